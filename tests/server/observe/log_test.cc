#include "server/observe/log.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::MatchesRegex;

class LogTest : public ::testing::Test {
 protected:
  void SetUp() override { SetLogLevel(LogLevel::kInfo); }
  void TearDown() override { SetLogLevel(LogLevel::kInfo); }

  // The lines that `body` logs.
  template <typename Body>
  std::vector<std::string> Capture(Body body) {
    ::testing::internal::CaptureStderr();
    body();
    std::vector<std::string> lines = absl::StrSplit(::testing::internal::GetCapturedStderr(), '\n', absl::SkipEmpty());
    return lines;
  }
};

TEST_F(LogTest, LineHasTimeLevelThreadAndText) {
  const auto lines = Capture([] { LogWarning("disk is \"full\""); });
  EXPECT_THAT(lines, ElementsAre(MatchesRegex("[0-9-]+T[0-9:.]+Z W [0-9]+ disk is \"full\"")));
}

TEST_F(LogTest, LevelSuppressesLowerOnes) {
  ASSERT_TRUE(SetLogLevel("warning"));
  EXPECT_FALSE(LogEnabled(LogLevel::kInfo));
  const auto lines = Capture([] {
    LogDebug("a");
    LogInfo("b");
    LogWarning("c");
    LogError("d");
  });
  EXPECT_EQ(lines.size(), 2u);
  SetLogLevel(LogLevel::kNone);
  EXPECT_TRUE(Capture([] { LogError("e"); }).empty());
}

TEST_F(LogTest, OnePlaceDoesNotFillTheLog) {
  constexpr int kLines = 100 * kLogBurst;
  auto say = [] { LogWarning(std::string(1000, 'x')); };
  const auto lines = Capture([&] {
    for (int i = 0; i < kLines; ++i) say();
    LogWarning("of another place");
  });
  EXPECT_GE(lines.size(), static_cast<size_t>(kLogBurst + 1));
  EXPECT_LT(lines.size(), static_cast<size_t>(2 * kLogBurst));  // a few more for the time that it took
  EXPECT_TRUE(absl::StrContains(lines.back(), "of another place"));
  std::vector<std::string> later;
  for (const absl::Time end = absl::Now() + absl::Seconds(30); later.empty() && absl::Now() < end;
       absl::SleepFor(absl::Milliseconds(10))) {
    later = Capture(say);
  }
  ASSERT_EQ(later.size(), 2u);
  EXPECT_THAT(later[0], MatchesRegex(".* W [0-9]+ [0-9]+ lines like the next were left out"));
}

TEST_F(LogTest, WhatOneUserLogsSuppressesNoLineOfAnothers) {
  const auto say = [](int64_t uid, LogLevel level) { LogOf(uid, level, std::to_string(uid)); };
  const auto lines = Capture([&] {
    for (int i = 0; i < 2 * kLogBurst; ++i) say(1000, LogLevel::kInfo);
    say(1001, LogLevel::kInfo);
    say(1000, LogLevel::kWarning);
  });
  EXPECT_LT(lines.size(), static_cast<size_t>(2 * kLogBurst));
  EXPECT_THAT(lines[lines.size() - 2], MatchesRegex(".* I [0-9]+ 1001"));
  EXPECT_THAT(lines[lines.size() - 1], MatchesRegex(".* W [0-9]+ 1000"));
}

TEST_F(LogTest, SubjectsBeyondThoseThatAreKeptApartShareALimit) {
  constexpr int kSubjects = 40'000;
  const absl::Time begin = absl::Now();
  const auto lines = Capture([] {
    for (int i = 0; i < kSubjects; ++i) LogOf(i, LogLevel::kInfo, "x");
  });
  // Each second those that have their whole limit again make room for as many others.
  const double kept_apart = 4096 * (1 + absl::ToDoubleSeconds(absl::Now() - begin));
  EXPECT_LT(static_cast<double>(lines.size()), kept_apart + 2 * kLogBurst);
  EXPECT_GT(lines.size(), 3000u);
}

TEST_F(LogTest, UnknownLevelIsRefusedAndChangesNothing) {
  ASSERT_TRUE(SetLogLevel("ERROR"));
  EXPECT_FALSE(SetLogLevel("loud"));
  EXPECT_FALSE(LogEnabled(LogLevel::kWarning));
}

TEST_F(LogTest, TextCannotForgeASecondLine) {
  const auto lines = Capture([] { LogInfo("a\n2026-01-01T00:00:00.000000Z E 1 forged\r"); });
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_TRUE(absl::EndsWith(lines[0], "forged "));
}

TEST_F(LogTest, ALineOfTheJournalBeginsWithItsLevel) {
  const auto lines = Capture([] {
    struct stat info {};
    ASSERT_EQ(fstat(STDERR_FILENO, &info), 0);
    setenv("JOURNAL_STREAM", (std::to_string(info.st_dev) + ":" + std::to_string(info.st_ino)).c_str(), 1);
    LogInfo("a");
    LogWarning("b");
    LogError("c");
    setenv("JOURNAL_STREAM", "1:2", 1);  // it was sent elsewhere
    LogError("d");
    unsetenv("JOURNAL_STREAM");
  });
  EXPECT_THAT(lines, ElementsAre(MatchesRegex("<6>[0-9].* I .* a"), MatchesRegex("<4>[0-9].* W .* b"),
                                 MatchesRegex("<3>[0-9].* E .* c"), MatchesRegex("[0-9].* E .* d")));
}

TEST_F(LogTest, AFileThatIsBoundedKeepsItsLastLines) {
  BoundLogFile(10'000);
  SetLogLevel(LogLevel::kDebug);  // whose lines are not limited
  const auto lines = Capture([] {
    for (int i = 0; i < 1000; ++i) LogDebug("line " + std::to_string(i));
  });
  BoundLogFile(0);
  ASSERT_GT(lines.size(), 20u);
  EXPECT_LT(lines.size(), 300u);
  EXPECT_TRUE(absl::EndsWith(lines.back(), "line 999"));
  for (const std::string& line : lines) EXPECT_THAT(line, MatchesRegex("[0-9-]+T[0-9:.]+Z D [0-9]+ line [0-9]+"));
}

TEST_F(LogTest, VeryLongTextIsOneBoundedLine) {
  const auto lines = Capture([] { LogInfo(std::string(1 << 20, 'x')); });
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_LE(lines[0].size(), 4096u);
}

TEST_F(LogTest, LinesOfSeveralThreadsStayWhole) {
  const auto lines = Capture([] {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([t] {
        for (int i = 0; i < kLogBurst / 4; ++i) {
          LogInfo(std::string(100, static_cast<char>('a' + t)));
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  });
  ASSERT_EQ(lines.size(), static_cast<size_t>(kLogBurst));
  for (const std::string& line : lines) {
    EXPECT_THAT(line, MatchesRegex(".* I [0-9]+ (a+|b+|c+|d+)"));
  }
}

}  // namespace
}  // namespace shardd
