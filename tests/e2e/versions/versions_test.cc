// Client, daemon and custodian of two builds: they speak what both know, and one daemon goes on with the job of
// another.

#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/e2e/cluster.h"
#include "tests/e2e/versions/builds.h"
#include "tests/testing/poll.h"
#include "tests/testing/programs.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using ::testing::HasSubstr;
using testing::PollUntil;

constexpr int kTurns = 12;

class Versions : public Cluster {
 protected:
  void StartOf(const Build& build, const std::vector<std::string>& flags = {}) {
    const ProgramsOf programs(build);
    StartDaemon(flags);
  }
  void StartCustodian(const Build& build) {
    custodian_ = std::make_unique<Child>(testing::Spawn(
        {build.bin() + "/shardd-custodian", "--listen=unix:" + Custody()}, {.log = File("custodian.log")}));
    ASSERT_TRUE(PollUntil([this] { return access(Custody().c_str(), F_OK) == 0; }));
  }
  std::string Custody() const { return File("custody.sock"); }
  void StartKept(const Build& build) { StartOf(build, {"--custodian=unix:" + Custody()}); }
  void KillDaemon() {
    ASSERT_EQ(kill(daemon_pid(), SIGKILL), 0);
    WaitForDaemon();
  }
  Child StartRankOf(const Build& build, int rank, const Args& args) {
    RanksFind(build.RankEnvironment());
    return StartRank(rank, args);
  }
  // What the daemon speaks. One from before there were ranges says one number.
  VersionRange Spoken() {
    const v1::Daemon daemon = DaemonStatus();
    const int oldest = daemon.oldest_protocol_version();
    return {oldest == 0 ? daemon.protocol_version() : oldest, daemon.protocol_version()};
  }
  void ExpectUndisturbed(const Args& args, std::vector<Child>& ranks) {
    for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
    const std::vector<TrainerReport> reports = {Report(args, 0), Report(args, 1)};
    ExpectAllOk(reports);
    RanksFind(ThisBuild().RankEnvironment());
    ExpectSame(reports, RunRanks(args.With({{"name", "undisturbed"}})));
  }
  static Args Training(int steps) { return {{"steps", absl::StrCat(steps)}, {"recover", "1"}, {"optimizer", "adamw"}}; }

  std::unique_ptr<Child> custodian_;
};

// By rank and of the daemon: whether it is of the other build.
class VersionsTogether : public Versions, public ::testing::WithParamInterface<std::tuple<bool, bool, bool>> {};

TEST_P(VersionsTogether, EachRankSpeaksWhatItAndTheDaemonKnow) {
  const auto [other_daemon, other_first, other_second] = GetParam();
  const auto build = [](bool other) { return other ? OtherBuild() : ThisBuild(); };
  StartOf(OtherBuild());
  const VersionRange other = Spoken();
  StopDaemon();
  StartOf(build(other_daemon));
  const Args undisturbed = Training(30);
  const Args args = undisturbed.With({{"pause", "end@30"}});
  std::vector<Child> ranks;
  ranks.push_back(StartRankOf(build(other_first), 0, args));
  ranks.push_back(StartRankOf(build(other_second), 1, args));
  for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "end", rank);
  const std::vector<v1::Rank> attached = Ranks();
  ASSERT_EQ(attached.size(), 2u);
  for (int rank = 0; rank < 2; ++rank) {
    const VersionRange own = (rank == 0 ? other_first : other_second) ? other : kProtocolVersions;
    const VersionRange daemons = other_daemon ? other : kProtocolVersions;
    if (DaemonStatus().oldest_protocol_version() != 0) {  // else it does not show it
      EXPECT_EQ(attached[rank].protocol_version(), std::min(own.newest, daemons.newest));
    }
    LetGo(args, "end", rank);
  }
  ExpectUndisturbed(undisturbed, ranks);
}

INSTANTIATE_TEST_SUITE_P(Builds, VersionsTogether,
                         ::testing::Combine(::testing::Bool(), ::testing::Bool(), ::testing::Bool()),
                         [](const auto& info) {
                           const auto name = [](bool other) { return other ? "Other" : "This"; };
                           return absl::StrCat(name(std::get<0>(info.param)), "Daemon", name(std::get<1>(info.param)),
                                               "And", name(std::get<2>(info.param)), "Rank");
                         });

// The custodian is not started anew with an upgrade. Param: it is of the other build.
class VersionsInTurn : public Versions, public ::testing::WithParamInterface<bool> {};

TEST_P(VersionsInTurn, DaemonsOfTwoBuildsTakeUpEachOthersJobs) {
  StartCustodian(GetParam() ? OtherBuild() : ThisBuild());
  StartKept(ThisBuild());
  const Args args = Training(100 * kTurns);
  std::vector<Child> ranks;
  ranks.push_back(StartRankOf(ThisBuild(), 0, args));
  ranks.push_back(StartRankOf(OtherBuild(), 1, args));
  ASSERT_TRUE(PollUntil([this] { return Job().committed_step() >= 2; }));
  std::mt19937 random(11);
  int turns = 0;
  for (; turns < kTurns && !ranks[0].Ended(); ++turns) {
    absl::SleepFor(absl::Microseconds(1000 + random() % 40000));
    const int64_t before = Job().committed_step();
    KillDaemon();
    StartKept(turns % 2 == 0 ? OtherBuild() : ThisBuild());
    if (HasFatalFailure()) return;
    EXPECT_GE(Job().committed_step(), before) << "turn " << turns;
  }
  EXPECT_GE(turns, kTurns / 2) << "the ranks were too fast";
  ExpectUndisturbed(args, ranks);
}

INSTANTIATE_TEST_SUITE_P(Custodians, VersionsInTurn, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Other" : "This"; });

TEST_F(Versions, JobsOfALaterFormatAreLeftToNewerDaemons) {
  if (!OtherIsNext()) GTEST_SKIP() << "SHARDD_OTHER_BUILD is set, and may write the same formats";
  StartCustodian(ThisBuild());
  StartKept(OtherBuild());
  const Args args = Training(200);
  {
    std::vector<Child> ranks;
    for (int rank = 0; rank < 2; ++rank) ranks.push_back(StartRankOf(OtherBuild(), rank, args));
    ASSERT_TRUE(PollUntil([this] { return Job().committed_step() >= 10; }));
    ASSERT_EQ(kill(daemon_pid(), SIGKILL), 0);
    for (Child& rank : ranks) {
      rank.Kill();
      rank.Wait();
    }
    WaitForDaemon();
  }
  StartKept(ThisBuild());
  EXPECT_EQ(Job().name(), "");
  EXPECT_THAT(
      testing::ReadWholeFile(DaemonLog()),
      HasSubstr(absl::StrCat("record of the job: this version of shardd does not read its format (got ",
                             kCustodyFormats.newest + 1, ", want ", kCustodyFormats.Text(), "); start a newer one")));
  KillDaemon();
  StartKept(OtherBuild());
  EXPECT_GE(Job().committed_step(), 10);
  std::vector<Child> ranks;
  for (int rank = 0; rank < 2; ++rank) ranks.push_back(StartRankOf(ThisBuild(), rank, args));
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  const std::vector<TrainerReport> reports = {Report(args, 0), Report(args, 1)};
  ExpectAllOk(reports);
  const std::vector<TrainerReport> want = RunRanks(args.With({{"name", "undisturbed"}}));
  for (size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(reports[rank].values, want[rank].values);
}

// Refused by name, on both sides.
TEST_F(Versions, ANewerRankIsToldToUpgradeTheDaemon) {
  StartOf(ThisBuild());
  const Args args = {{"steps", "2"}, {"world", "1"}};
  EXPECT_EQ(StartRankOf(LaterBuild(), 0, args).Wait(), 0);
  EXPECT_EQ(Report(args, 0).code, static_cast<int>(Code::kFailedPrecondition));
  EXPECT_THAT(Report(args, 0).message, HasSubstr(absl::StrCat("no common protocol version (got 15 to 16, want ",
                                                              kProtocolVersions.Text(), "); upgrade this daemon")));
}

TEST_F(Versions, ANewerDaemonTellsRanksToUpgrade) {
  StartOf(LaterBuild());
  const Args args = {{"steps", "2"}, {"world", "1"}};
  EXPECT_EQ(StartRankOf(ThisBuild(), 0, args).Wait(), 0);
  EXPECT_EQ(Report(args, 0).code, static_cast<int>(Code::kFailedPrecondition));
  EXPECT_THAT(Report(args, 0).message,
              HasSubstr(absl::StrCat("no common protocol version (got ", kProtocolVersions.Text(),
                                     ", want 15 to 16); upgrade the client")));
}

TEST_F(Versions, ANewerDaemonSaysThatItsCustodianIsBehind) {
  StartCustodian(ThisBuild());
  const ProgramsOf programs(LaterBuild());
  testing::DaemonProcess daemon(File(""), "cpu:1", {"--custodian=unix:" + Custody()});
  EXPECT_THAT(testing::ReadWholeFile(daemon.log()),
              HasSubstr(absl::StrCat("no common version of custody (got 3, want ", kCustodyVersions.Text(),
                                     "); upgrade this custodian")));
}

}  // namespace
}  // namespace shardd::e2e
