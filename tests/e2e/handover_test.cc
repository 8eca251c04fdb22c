// A daemon gives its place to another one while ranks train, again and again: no step is done twice, and what comes of
// it has the bits of an undisturbed run.

#include <signal.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status/grpc_status.h"
#include "tests/e2e/kept_cluster.h"
#include "tests/testing/fake_cuda.h"
#include "tests/testing/long_run.h"
#include "tests/testing/poll.h"
#include "tests/testing/programs.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

// A long run: SHARDD_HANDOVERS=100.
int Handovers() { return testing::LongRun("SHARDD_HANDOVERS", 6); }

class Handover : public KeptCluster {
 protected:
  // Successors are nobody's children.
  ~Handover() override {
    if (const int64_t pid = DaemonStatus().pid(); pid > 0 && pid != daemon_pid()) {
      kill(static_cast<pid_t>(pid), SIGTERM);
      EXPECT_TRUE(PollUntil([pid] { return kill(static_cast<pid_t>(pid), 0) != 0; }));
    }
  }
  // The code of `shardctl handover`; what it prints is in Said().
  int HandOver(const std::vector<std::string>& flags = {}) {
    std::vector<std::string> command = {testing::ProgramPath("shardctl"), "handover", "--address=unix:" + socket()};
    command.insert(command.end(), flags.begin(), flags.end());
    unlink(File("handover.log").c_str());
    return testing::Spawn(command, {.log = File("handover.log")}).Wait();
  }
  std::string Said() const { return testing::ReadWholeFile(File("handover.log")); }
  // Asks the daemon itself, as the next one does.
  absl::Status Ask() {
    grpc::ClientContext context;
    v1::HandOverResponse response;
    return FromGrpcStatus(jobs().HandOver(&context, v1::HandOverRequest(), &response));
  }
};

class HandoverWith : public Handover, public ::testing::WithParamInterface<const char*> {};

TEST_P(HandoverWith, LosesNoStepAtAnyMoment) {
  const Args args = Training(400 * Handovers(), GetParam());
  StartCustodian();
  StartKept();
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 2; }));
  std::mt19937 random(23);
  int handovers = 0;
  for (; handovers < Handovers() && !ranks[0].Ended(); ++handovers) {
    absl::SleepFor(absl::Microseconds(1000 + random() % 60000));
    const int64_t before = Committed();
    const int64_t pid = DaemonStatus().pid();
    ASSERT_EQ(HandOver(), 0) << "handover " << handovers << ": " << Said();
    EXPECT_NE(DaemonStatus().pid(), pid);
    const int64_t after = Committed();  // of a job that has ended there is none
    EXPECT_TRUE(after >= before || ranks[0].Ended())
        << "handover " << handovers << ": " << after << " after " << before;
  }
  EXPECT_GE(handovers, Handovers() / 2) << "the ranks were too fast";
  ExpectUndisturbed(args, ranks);
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(Report(args, rank).Note("lost a step"), "") << "rank " << rank;
}

INSTANTIATE_TEST_SUITE_P(Optimizers, HandoverWith, ::testing::Values("adamw", "sgd"),
                         [](const auto& info) { return std::string(info.param); });

// The next one takes memory of GPUs when the one before has ended, or has said that it writes no more.
TEST_F(Handover, OfAJobOnGpusLosesNoStep) {
  SHARDD_NEEDS_GPUS(1);
  RanksFind(testing::FakeCudaEnvironment(1));
  KeptOn("cuda:all", testing::FakeCudaEnvironment(1, {"FAKE_CUDA_DELAY_SEED=7"}));
  StartCustodian();
  StartKept();
  const Args args = Training(150).With({{"device_memory", "1"}});
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
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(Report(args, rank).Note("lost a step"), "") << "rank " << rank;
}

TEST_F(Handover, OneThatCannotStartLeavesTheDaemonAsItWas) {
  StartCustodian();
  // A copy that can be replaced: what lies there at the handover is not a daemon.
  const std::string program = File("shardd");
  std::filesystem::copy_file(testing::ProgramPath("shardd"), program);
  StartDaemon({"--custodian=unix:" + Custody()}, "cpu:2", {}, program);
  const Args args = Training(400);
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 5; }));
  const int64_t pid = DaemonStatus().pid();
  std::filesystem::remove(program);
  std::ofstream(program) << "#!/bin/sh\nexit 3\n";
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  EXPECT_EQ(HandOver(), 1);
  EXPECT_TRUE(absl::StrContains(Said(), "has ended before it was ready")) << Said();
  EXPECT_EQ(DaemonStatus().pid(), pid);
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
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(Report(args, rank).Note("lost a step"), "") << "rank " << rank;
}

}  // namespace
}  // namespace shardd::e2e
