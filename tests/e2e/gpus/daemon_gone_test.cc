// The daemon dies while trainers' streams wait for it (shardd_set_cuda_stream): their streams are let go, their calls
// end by name, and the daemon that takes its place says what it does not have any more, and serves them.

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/cluster.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

constexpr int64_t kLetGoLimitMs = 5000;  // and what it takes is 20 ms

class DaemonGone : public Cluster {
 protected:
  void SetUp() override { SHARDD_NEEDS_GPUS(1); }
  void StartOnGpus(std::vector<std::string> daemon_only = {}) {
    const int gpus = testing::GpusAtMost(2);
    RanksFind(testing::FakeCudaEnvironment(gpus, {"FAKE_CUDA_DELAY_SEED=11"}));
    daemon_only.push_back("FAKE_CUDA_DELAY_SEED=7");
    StartDaemon({}, "cuda:all", testing::FakeCudaEnvironment(gpus, daemon_only));
  }
  // Ranks whose time for a call is far longer than what they are to take.
  static Args Trainers(const Args& memory) {
    return memory.With({{"model", "stream"}, {"device_memory", "1"}, {"timeout_ms", "100000"}, {"recover_gone", "1"}});
  }
  // A rank that waits at `moment`, where that is not empty, and before it attaches to the next daemon.
  Child Start(int rank, const Args& args, const std::string& moment = "") {
    return StartRank(rank, args.With({{"pause", moment.empty() ? "gone" : moment + ",gone"}}));
  }
  void KillDaemon() {
    kill(daemon_pid(), SIGKILL);
    EXPECT_EQ(WaitForDaemon(), 1000 + SIGKILL);
  }
  // Each has been told that the daemon is gone, and its streams have ended; another daemon has taken its place, which
  // refuses the ranks' sessions and has nothing of the first one's.
  void ExpectLetGoAndRefusedByTheNext(const Args& args, std::vector<Child>& ranks) {
    for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "gone", rank);
    StartOnGpus();
    for (int rank = 0; rank < 2; ++rank) LetGo(args, "gone", rank);
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(ranks[static_cast<size_t>(rank)].Wait(), 0);
      const TrainerReport report = Report(args, rank);
      EXPECT_TRUE(absl::StrContains(report.Note("gone "), "daemon")) << report.Note("gone ");
      const std::string drained = report.Note("let_go ");
      ASSERT_FALSE(drained.empty());
      EXPECT_LT(std::atoll(drained.c_str() + 7), kLetGoLimitMs);
      EXPECT_EQ(report.code, static_cast<int>(Code::kNotFound)) << report.message;
      EXPECT_TRUE(absl::StrContains(report.message, "the daemon was restarted")) << report.message;
    }
    const Args again = args.With({{"name", "again"}, {"steps", "10"}});
    ExpectParity(again, RunRanks(again));
  }
};

class DaemonGoneWith : public DaemonGone, public ::testing::WithParamInterface<std::pair<const char*, Args>> {};

// Rank 0's stream waits for a commit for which rank 1 has not asked yet.
TEST_P(DaemonGoneWith, WhileAStreamWaitsForACommit) {
  StartOnGpus();
  const Args args = Trainers(GetParam().second);
  std::vector<Child> ranks;
  ranks.push_back(Start(0, args.With({{"mark", "step_sent@3"}})));
  ranks.push_back(Start(1, args, "before_step@3"));
  AwaitPause(args, "step_sent", 0);
  AwaitPause(args, "before_step", 1);
  KillDaemon();
  LetGo(args, "before_step", 1);
  ExpectLetGoAndRefusedByTheNext(args, ranks);
}

// Whatever they wait for then: slots, sums, commits.
TEST_P(DaemonGoneWith, InTheMiddleOfSteps) {
  StartOnGpus();
  const Args args = Trainers(GetParam().second).With({{"steps", "20000"}, {"look", "1"}, {"unshard_mode", "POOLED"}});
  std::vector<Child> ranks;
  for (int rank = 0; rank < 2; ++rank) ranks.push_back(Start(rank, args));
  ASSERT_TRUE(PollUntil([&] { return Job().committed_step() > 3; }));
  KillDaemon();
  ExpectLetGoAndRefusedByTheNext(args, ranks);
}

INSTANTIATE_TEST_SUITE_P(Memory, DaemonGoneWith,
                         ::testing::Values(std::pair("OnGpus", Args{}),
                                           std::pair("Offloaded", Args{{"offload", "HOST"}})),
                         [](const auto& info) { return std::string(info.param.first); });

// A sum that the daemon's GPU copies to pinned memory of the host has begun, and does not end; the ranks' streams wait
// for it.
TEST_F(DaemonGone, WhileASumIsOnItsWayToTheHost) {
  SHARDD_NEEDS_FAKE_GPUS("a copy does not end");
  const std::string lose = File("lose");
  std::ofstream(lose).flush();
  StartOnGpus({"FAKE_CUDA_LOSE_FILE=" + lose});
  const Args args = Trainers({{"offload", "HOST"}, {"look", "1"}, {"strategy", "SHARD_GRAD_OP"}});
  std::vector<Child> ranks;
  for (int rank = 0; rank < 2; ++rank) ranks.push_back(Start(rank, args, "read_head@3"));
  for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "read_head", rank);
  // All is unsharded: what is still to be copied in this step are sums.
  std::ofstream(lose) << "0 copy\n" << std::flush;
  for (int rank = 0; rank < 2; ++rank) LetGo(args, "read_head", rank);
  ASSERT_TRUE(PollUntil([&] { return access((lose + ".seen").c_str(), F_OK) == 0; }));
  EXPECT_EQ(Job().committed_step(), 3);
  KillDaemon();
  ExpectLetGoAndRefusedByTheNext(args, ranks);
}

}  // namespace
}  // namespace shardd::e2e
