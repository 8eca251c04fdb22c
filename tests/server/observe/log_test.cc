#include "server/observe/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
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
        for (int i = 0; i < 200; ++i) {
          LogInfo(std::string(100, static_cast<char>('a' + t)));
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  });
  ASSERT_EQ(lines.size(), 800u);
  for (const std::string& line : lines) {
    EXPECT_THAT(line, MatchesRegex(".* I [0-9]+ (a+|b+|c+|d+)"));
  }
}

}  // namespace
}  // namespace shardd
