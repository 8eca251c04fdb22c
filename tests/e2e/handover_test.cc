// A daemon gives its place to another one while ranks train, again and again: no step is done twice, and what comes of
// it has the bits of an undisturbed run.

#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/e2e/handover_cluster.h"
#include "tests/testing/fake_cuda.h"
#include "tests/testing/poll.h"
#include "tests/testing/programs.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

class Handover : public HandoverCluster {
 protected:
  // Two ranks train under a daemon in whose place a script is to come.
  std::vector<Child> TrainUnderOneToBeReplaced(const Args& args) {
    StartCustodian();
    PutThere(testing::ProgramPath("shardd"));
    StartReplaceable();
    std::vector<Child> ranks = StartRanks(args);
    EXPECT_TRUE(PollUntil([this] { return Committed() >= 5; }));
    return ranks;
  }
  void ExpectThatItCannotStart(const std::string& script) {
    const int64_t pid = DaemonStatus().pid();
    std::filesystem::remove(File("shardd"));
    std::ofstream(File("shardd")) << "#!/bin/sh\n" << script << "\n";
    std::filesystem::permissions(File("shardd"), std::filesystem::perms::owner_all);
    EXPECT_EQ(HandOver(), 1);
    EXPECT_TRUE(absl::StrContains(Said(), "has ended before it was ready")) << Said();
    EXPECT_EQ(DaemonStatus().pid(), pid);
  }
  void ExpectNoStepLost(const Args& args) {
    for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(Report(args, rank).Note("lost a step"), "") << "rank " << rank;
  }
  void AwaitThatRank0WaitsForRank1() {
    ASSERT_TRUE(PollUntil([this] {
      const std::vector<v1::Rank> seen = Ranks();
      return seen.size() == 2 && absl::StrContains(seen[0].waiting_for(), "rank 1");
    }));
  }
  // Returns when the daemon has begun to stop.
  void AskToStop() {
    ASSERT_EQ(kill(daemon_pid(), SIGTERM), 0);
    ASSERT_TRUE(PollUntil([this] { return absl::StrContains(testing::ReadWholeFile(DaemonLog()), "shutting down"); }));
  }
  // Two ranks train, and their daemon is killed. The next one begins to stop when rank 0 waits for rank 1, which stands
  // still and has yet to attach to it.
  std::vector<Child> AskToStopWhileRank1IsOnItsWay(const Args& args) {
    StartCustodian();
    StartKept();
    std::vector<Child> ranks = StartRanks(args);
    EXPECT_TRUE(PollUntil([this] { return Committed() >= 5; }));
    ranks[1].Kill(SIGSTOP);
    KillDaemon();
    StartKept();
    AwaitThatRank0WaitsForRank1();
    AskToStop();
    return ranks;
  }
};

class HandoverWith : public Handover, public ::testing::WithParamInterface<const char*> {};

TEST_P(HandoverWith, LosesNoStepAtAnyMoment) {
  const Args args = UntilEnough(Training(kUntilEnough, GetParam()));
  StartCustodian();
  StartKept();
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 2; }));
  std::mt19937 random(23);
  std::vector<int64_t> begins_ms;
  for (int handovers = 0; handovers < Handovers(); ++handovers) {
    absl::SleepFor(absl::Microseconds(random() % 60000));
    const int64_t before = Committed();
    const int64_t pid = DaemonStatus().pid();
    begins_ms.push_back(NowMs());
    ASSERT_EQ(HandOver(), 0) << "handover " << handovers << ": " << Said();
    EXPECT_NE(DaemonStatus().pid(), pid);
    EXPECT_GE(Committed(), before) << "handover " << handovers;
  }
  EXPECT_FALSE(ranks[0].Ended());
  SayEnough();
  ExpectUndisturbed(args, ranks);
  ExpectNoStepLost(args);
  PrintPauses(begins_ms, Reports(args));
}

INSTANTIATE_TEST_SUITE_P(Optimizers, HandoverWith, ::testing::Values("adamw", "sgd"),
                         [](const auto& info) { return std::string(info.param); });

// Edits behind the last step come along.
TEST_F(Handover, WhereRanksEditLosesNoStep) {
  StartCustodian();
  StartKept();
  const Args args = UntilEnough(kEdits);
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 5; }));
  for (int handover = 0; handover < 4; ++handover) {
    ASSERT_EQ(HandOver(), 0) << Said();
  }
  SayEnough();
  ExpectUndisturbed(args, ranks);
  ExpectNoStepLost(args);
}

struct OnGpus {
  const char* name;
  Args args;
  friend void PrintTo(const OnGpus& value, std::ostream* out) { *out << value.name; }
};

class HandoverOnGpus : public Handover, public ::testing::WithParamInterface<OnGpus> {};

// The next one takes memory of GPUs when the one before has ended, or has said that it writes no more. Hosts are ahead
// of their streams, and no further than the step behind which the daemon ends.
TEST_P(HandoverOnGpus, LosesNoStep) {
  SHARDD_NEEDS_GPUS(1);
  RanksFind(testing::FakeCudaEnvironment(1));
  KeptOn("cuda:all", testing::FakeCudaEnvironment(1, {"FAKE_CUDA_DELAY_SEED=7"}));
  StartCustodian();
  StartKept();
  const Args args = GetParam().args.With(Training(150)).With({{"device_memory", "1"}});
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 5; }));
  for (int handover = 0; handover < 3; ++handover) {
    const int64_t before = Committed();
    const int64_t pid = DaemonStatus().pid();
    ASSERT_EQ(HandOver(), 0) << Said();
    EXPECT_NE(DaemonStatus().pid(), pid);
    EXPECT_GE(Committed(), before);
  }
  ExpectUndisturbed(args, ranks);
  ExpectNoStepLost(args);
}

const Args kWriting = {{"trainers_write", "1"}, {"numel", "20011"}};
INSTANTIATE_TEST_SUITE_P(
    Jobs, HandoverOnGpus,
    ::testing::Values(OnGpus{"OfTheDaemonsOptimizer", {}},
                      OnGpus{"OfRanksThatEdit", kWriting.With({{"model", "blocks"}, {"blocks", "2"}})},
                      OnGpus{"OfAnOptimizerInTheRanks",
                             kWriting.With({{"model", "pass"}, {"blocks", "3"}, {"trained", "adam"}})}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_F(Handover, OneThatCannotStartLeavesTheDaemonAsItWas) {
  const Args args = Training(400);
  std::vector<Child> ranks = TrainUnderOneToBeReplaced(args);
  ExpectThatItCannotStart("exit 3");
  ExpectUndisturbed(args, ranks);
}

// What can be known of flags and files is known before the daemon lets go of anything.
TEST_F(Handover, OneWithWrongFlagsLeavesTheDaemonAsItWas) {
  const Args args = Training(600);
  std::vector<Child> ranks = TrainUnderOneToBeReplaced(args);
  for (const std::string flags :
       {"--view_group=99999999999", "--custodian=unix:/no/custodian.sock", "--peer_listen=0.0.0.0:0 --peer_insecure",
        "--peer_listen=127.0.0.1:0 --peer_keepalive_ms=5", "--peer_listen=192.0.2.1:0 --peer_insecure",
        "--peer_listen=127.0.0.1:0 --peer_cert=/no/cert.pem --peer_key=/no/key.pem --peer_ca=/no/ca.pem",
        "--history_dir=/proc/nothing", "--history_dir=/tmp --history_mib=1"}) {
    SCOPED_TRACE(flags);
    const int64_t before = Committed();
    ExpectThatItCannotStart(absl::StrCat("exec ", testing::ProgramPath("shardd"), " \"$@\" ", flags));
    EXPECT_TRUE(PollUntil([&] { return Committed() > before || ranks[0].Ended(); }));
  }
  ExpectUndisturbed(args, ranks);
}

TEST_F(Handover, IsRefusedWhereJobsWouldEnd) {
  StartDaemon();
  const Args args = Training(5).With({{"pause", "end@5"}});
  std::vector<Child> ranks = StartRanks(args);
  for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "end", rank);
  EXPECT_EQ(HandOver(), 1);
  EXPECT_TRUE(absl::StrContains(Said(), "it has no custodian")) << Said();
  EXPECT_EQ(Ask().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(DaemonAlive());
  for (int rank = 0; rank < 2; ++rank) LetGo(args, "end", rank);
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
}

// Whoever has asked and dies then has left nobody: the daemon says so with its exit code, and another one finds the
// job.
// It would look for shards in a snapshot that has none, and the job would be lost.
TEST_F(Handover, AnOlderDaemonThanAJobsSnapshotsIsRefused) {
  const Args args = {{"steps", "400"},   {"recover", "1"},        {"trained", "adam"},
                     {"model", "pass"},  {"trainers_write", "1"}, {"blocks", "3"},
                     {"numel", "60013"}, {"keep_every", "1"},     {"timeout_ms", "60000"}};
  StartCustodian();
  StartKept();
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 5; }));
  const int64_t pid = DaemonStatus().pid();
  const absl::Status refused = Ask();  // as one that reads format 1 of everything
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(absl::StrContains(refused.message(), "does not read the format of the take-up log (got 2, want 1)"))
      << refused;
  EXPECT_EQ(DaemonStatus().pid(), pid);
  ExpectUndisturbed(args, ranks);
}

TEST_F(Handover, OneThatDiesWhenItHasAskedLosesNothing) {
  StartCustodian();
  StartKept();
  const Args args = Training(600);
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 5; }));
  ASSERT_TRUE(Ask().ok());
  KillDaemon();  // it waits for the next one, which never comes
  StartKept();
  ExpectUndisturbed(args, ranks);
  ExpectNoStepLost(args);
}

// A daemon that stops while a rank is on its way to it lets the rank come, and finish the step that others have begun.
TEST_F(Handover, AStopWaitsForARankThatAttachesAgain) {
  const Args args = Training(600);
  std::vector<Child> ranks = AskToStopWhileRank1IsOnItsWay(args);
  EXPECT_EQ(HandOver(), 1) << "it ends anyway";
  ASSERT_EQ(kill(daemon_pid(), SIGUSR2), 0) << "of who has asked for its state before";
  ranks[1].Kill(SIGCONT);
  WaitForDaemon();
  StartKept();
  ExpectUndisturbed(args, ranks);
  for (int rank = 0; rank < 2; ++rank) {
    const std::vector<std::string> notes = Report(args, rank).notes;
    EXPECT_LE(std::count(notes.begin(), notes.end(), "lost a step"), 1) << "rank " << rank << ", by the kill";
  }
}

// ... but not for one that dies on its way.
TEST_F(Handover, AStopDoesNotWaitForARankThatDies) {
  flags_ = {"--finish_step_ms=3600000"};
  const Args args = Training(600);
  std::vector<Child> ranks = AskToStopWhileRank1IsOnItsWay(args);
  ranks[1].Kill(SIGKILL);
  ranks[1].Wait();
  WaitForDaemon();
  StartKept();
  ranks.pop_back();
  ranks.push_back(StartRank(1, args));
  ExpectUndisturbed(args, ranks);
}

}  // namespace
}  // namespace shardd::e2e
