#include "server/service/session_events.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardd {
namespace {

class SessionEventsTest : public ::testing::Test {
 protected:
  void Words(uint64_t consumed, uint64_t version = 0) {
    v1::SessionEvent event;
    event.mutable_words()->set_consumed(consumed);
    event.mutable_words()->set_version(version);
    events_.Add(std::move(event));
  }
  void Waiting(const std::string& what) {
    v1::SessionEvent event;
    event.mutable_waiting()->set_for_what(what);
    events_.Add(std::move(event));
  }
  std::string Take() { return events_.Take().ShortDebugString(); }

  SessionEvents events_;
};

TEST_F(SessionEventsTest, WordsThatWaitTakeUpTheNewerNumbers) {
  for (uint64_t i = 1; i <= 1000; ++i) Words(i, i == 500 ? 7 : 0);
  EXPECT_EQ(events_.size(), 1u);
  EXPECT_EQ(Take(), "words { consumed: 1000 version: 7 }");
  Words(1001);
  EXPECT_EQ(Take(), "words { consumed: 1001 }") << "what was written is not written again";
}

TEST_F(SessionEventsTest, EntriesOfWordsAreReplacedAsAWhole) {
  for (const int64_t place : {64, 0}) {
    v1::SessionEvent event;
    (*event.mutable_words()->mutable_groups())[1].set_unsharded(place == 64 ? 1 : 2);
    (*event.mutable_words()->mutable_groups())[1].set_pool_offset_bytes(place);
    (*event.mutable_words()->mutable_groups())[static_cast<int32_t>(place)].set_issued(5);
    events_.Add(std::move(event));
  }
  const v1::SessionEvent event = events_.Take();
  EXPECT_EQ(event.words().groups().at(1).ShortDebugString(), "unsharded: 2");
  EXPECT_EQ(event.words().groups().at(64).issued(), 5u);
  EXPECT_EQ(event.words().groups().at(0).issued(), 5u);
}

TEST_F(SessionEventsTest, OtherEventsKeepTheirOrderBesideWords) {
  Waiting("a");
  Words(1);
  Waiting("b");
  Words(2);
  EXPECT_EQ(Take(), "waiting { for_what: \"a\" }");
  EXPECT_EQ(Take(), "words { consumed: 2 }");
  EXPECT_EQ(Take(), "waiting { for_what: \"b\" }");
  EXPECT_TRUE(events_.empty());
}

TEST_F(SessionEventsTest, AFullQueueTakesTheEndAndWordsAlone) {
  for (size_t i = 0; i < SessionEvents::kMost + 10; ++i) Waiting("x");
  EXPECT_EQ(events_.size(), SessionEvents::kMost);
  Words(1);
  v1::SessionEvent aborted;
  aborted.mutable_aborted();
  events_.Add(aborted);
  EXPECT_EQ(events_.size(), SessionEvents::kMost + 2);
}

}  // namespace
}  // namespace shardd
