#include "server/observe/events.h"

#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<uint64_t> Sequences(const std::vector<v1::Event>& events) {
  std::vector<uint64_t> sequences;
  for (const v1::Event& event : events) {
    sequences.push_back(event.sequence());
  }
  return sequences;
}

TEST(EventLogTest, EventKeepsWhatItWasGiven) {
  EventLog log;
  log.Add("gpt", {1000}, 3, 41, 2, "abort", "rank 2 died");
  const std::vector<v1::Event> events = log.List();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].sequence(), 1u);
  EXPECT_GT(events[0].unix_us(), 0);
  EXPECT_EQ(events[0].job(), "gpt");
  EXPECT_EQ(events[0].epoch(), 3u);
  EXPECT_EQ(events[0].step(), 41);
  EXPECT_EQ(events[0].rank(), 2);
  EXPECT_EQ(events[0].kind(), "abort");
  EXPECT_EQ(events[0].text(), "rank 2 died");
}

TEST(EventLogTest, OldestAreDroppedAndNumbersGoOn) {
  EventLog log(3);
  for (int i = 0; i < 5; ++i) {
    log.Add("gpt", {0}, 0, i, -1, "commit", "");
  }
  EXPECT_THAT(Sequences(log.List()), ElementsAre(3, 4, 5));
  EXPECT_EQ(log.last_sequence(), 5u);
}

TEST(EventLogTest, LimitTakesTheNewestOldestFirst) {
  EventLog log;
  for (int i = 0; i < 300; ++i) {
    log.Add("gpt", {0}, 0, i, -1, "commit", "");
  }
  EXPECT_THAT(Sequences(log.List("gpt", 2)), ElementsAre(299, 300));
  EXPECT_EQ(log.List("gpt", 0).size(), 100u);
  EXPECT_EQ(log.List("gpt", 1000).size(), 300u);
}

TEST(EventLogTest, ListChoosesByJobAndOwner) {
  EventLog log;
  log.Add("a", {1}, 0, 0, -1, "attach", "");
  log.Add("b", {2}, 0, 0, -1, "attach", "");
  log.Add("a", {2}, 0, 0, -1, "attach", "");
  EXPECT_THAT(Sequences(log.List("a")), ElementsAre(1, 3));
  EXPECT_THAT(Sequences(log.List("", 10, [](const Tenant& owner) { return owner.uid == 2; })), ElementsAre(2, 3));
  EXPECT_THAT(Sequences(log.List("a", 10, [](const Tenant& owner) { return owner.uid == 2; })), ElementsAre(3));
  EXPECT_THAT(log.List("c"), IsEmpty());
}

TEST(EventLogTest, LimitCountsOnlyWhatTheCallerSees) {
  EventLog log;
  log.Add("a", {1}, 0, 0, -1, "attach", "");
  for (int i = 0; i < 200; ++i) {
    log.Add("b", {2}, 0, 0, -1, "attach", "");
  }
  EXPECT_THAT(Sequences(log.List("", 5, [](const Tenant& owner) { return owner.uid == 1; })), ElementsAre(1));
}

TEST(EventLogTest, LongTextIsCutBetweenCharacters) {
  EventLog log;
  std::string text = "x";
  while (text.size() < 5000) {
    text += "\xc3\xa4";  // two bytes, and the cut falls on an odd one
  }
  log.Add("a", {0}, 0, 0, -1, "abort", text);
  const std::string cut = log.List()[0].text();
  EXPECT_LE(cut.size(), EventLog::kMaxTextBytes);
  EXPECT_EQ(cut.substr(cut.size() - 3), "...");
  EXPECT_EQ((cut.size() - 1 - 3) % 2, 0u);
}

TEST(EventLogTest, ManyThreadsAddWithoutLosingNumbers) {
  EventLog log;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&log] {
      for (int i = 0; i < 500; ++i) {
        log.Add("a", {0}, 0, i, -1, "commit", "");
        (void)log.List("a", 3);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const std::vector<uint64_t> sequences = Sequences(log.List("a", 4096));
  ASSERT_EQ(sequences.size(), 2000u);
  for (size_t i = 0; i < sequences.size(); ++i) {
    EXPECT_EQ(sequences[i], i + 1);
  }
}

}  // namespace
}  // namespace shardd
