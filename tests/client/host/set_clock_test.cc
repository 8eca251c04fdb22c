// Ranks whose wall clock is set, an hour back or forward at each look at it: waits are as long as they should be.

#include "tests/testing/set_clock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/client/client_fixture.h"
#include "tests/testing/programs.h"

namespace shardd::testing_client {
namespace {

using ::testing::HasSubstr;

constexpr int kRanks = 2;
constexpr int kSteps = 4;

// What an unsharded run of train_to_the_end (programs.cc) has in the end: plain SGD, all values exact in binary.
std::string LastLine() {
  float value = 0;
  for (int step = 1; step <= kSteps; ++step) {
    float mean = 0;
    for (int rank = 0; rank < kRanks; ++rank) mean += 0.25f * static_cast<float>((rank + 1) * step) / kRanks;
    value -= 0.125f * mean;
  }
  return absl::StrFormat("%a to %a\n", value, value);
}

class SetClock : public ::testing::TestWithParam<const char*> {
 protected:
  // A process whose clock is set runs `program`.
  Child Start(const std::string& program, int rank, std::vector<std::string> environment) {
    const std::vector<std::string> clock = testing::SetClockEnvironment(GetParam());
    environment.insert(environment.end(), clock.begin(), clock.end());
    environment.insert(environment.end(), {absl::StrCat("TEST_RANK=", rank), "TEST_GO=" + dir_.File("go"),
                                           absl::StrCat("TEST_WORLD=", kRanks), absl::StrCat("TEST_STEPS=", kSteps)});
    return SpawnProgram(program, environment, Log(rank));
  }
  std::vector<Child> StartRanks(const std::string& address) {
    std::vector<Child> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.push_back(Start("train_to_the_end", rank, {"TEST_ADDRESS=" + address}));
    }
    return ranks;
  }
  void Go() { dir_.Write("go", ""); }
  bool AwaitAllSay(const std::string& text) {
    return Eventually([&] {
      bool all = true;
      for (int rank = 0; rank < kRanks; ++rank) all = all && absl::StrContains(Output(rank), text);
      return all;
    });
  }
  void ExpectTrained(std::vector<Child>& ranks) {
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(ranks[static_cast<size_t>(rank)].Wait(), 0) << Output(rank);
      EXPECT_THAT(Output(rank), HasSubstr(LastLine()));
    }
  }
  std::string Log(int rank) const { return dir_.File(absl::StrCat("rank", rank, ".log")); }
  std::string Output(int rank) const { return ReadWholeFile(Log(rank)); }

  TempDir dir_;
};

TEST_P(SetClock, RanksTrainAsWithoutIt) {
  SHARDD_NEEDS_SET_CLOCK();
  Daemon daemon(kRanks);
  Go();
  std::vector<Child> ranks = StartRanks(daemon.address());
  ExpectTrained(ranks);
}

TEST_P(SetClock, RanksAwaitTheirDaemonsSuccessor) {
  SHARDD_NEEDS_SET_CLOCK();
  const std::string custody = dir_.File("custody.sock");
  Child custodian = testing::Spawn({testing::ProgramPath("shardd-custodian"), "--listen=unix:" + custody},
                                   {.log = dir_.File("custodian.log")});
  ASSERT_TRUE(Eventually([&] { return access(custody.c_str(), F_OK) == 0; }));
  const std::vector<std::string> flags = {"--custodian=unix:" + custody};
  auto daemon = std::make_unique<testing::DaemonProcess>(dir_.path(), absl::StrCat("cpu:", kRanks), flags);
  ASSERT_TRUE(daemon->listened()) << ReadWholeFile(daemon->log());
  std::vector<Child> ranks = StartRanks(daemon->address());
  ASSERT_TRUE(AwaitAllSay("step 2\n")) << Output(0) << Output(1);
  daemon->process().Kill();
  Go();
  // For more than a second, in which they look at the clock at each try.
  ASSERT_TRUE(AwaitAllSay("waits up to 1m for a daemon")) << Output(0) << Output(1);
  daemon.reset();
  daemon = std::make_unique<testing::DaemonProcess>(dir_.path(), absl::StrCat("cpu:", kRanks), flags);
  ASSERT_TRUE(daemon->listened()) << ReadWholeFile(daemon->log());
  ExpectTrained(ranks);
}

TEST_P(SetClock, ACallThatIsNotAnsweredEndsInTime) {
  SHARDD_NEEDS_SET_CLOCK();
  Daemon daemon(kRanks);
  daemon.process().Kill(SIGSTOP);  // the kernel takes its connections all the same
  Child rank = Start("train_to_the_end", 0, {"TEST_ADDRESS=" + daemon.address(), "TEST_TIMEOUT_MS=1500"});
  EXPECT_EQ(rank.Wait(), 1) << Output(0);
  EXPECT_THAT(Output(0), HasSubstr(absl::StrCat("code ", kDeadlineExceeded)));
  daemon.process().Kill(SIGCONT);
}

INSTANTIATE_TEST_SUITE_P(Directions, SetClock, ::testing::Values("back", "forward"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace shardd::testing_client
