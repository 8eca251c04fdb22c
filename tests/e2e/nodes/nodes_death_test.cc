// Daemons of a job over several nodes are killed while it trains, and each one's successor goes on with what its
// custodian has kept: no step that a rank has seen is lost, also where every part of the job exists once.

#include <signal.h>

#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/e2e/nodes/nodes.h"
#include "tests/testing/fake_cuda.h"
#include "tests/testing/long_run.h"
#include "tests/testing/poll.h"
#include "tests/testing/programs.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

// For each kind of job; daemons on GPUs take long to begin. A long run: SHARDD_DEATHS=250, and SHARDD_DEATH_SEED.
int Kills(int gpus) { return testing::LongRun("SHARDD_DEATHS", gpus > 0 ? 5 : 20); }

struct NodesCase {
  const char* name;
  const char* strategy;
  int gpus;  // of each node; 0: CPUs
};

class NodesDeath : public Nodes, public ::testing::WithParamInterface<NodesCase> {
 protected:
  ~NodesDeath() override {
    for (int k = 0; handed_over_ && k < count(); ++k) {  // successors are nobody's children
      const auto pid = static_cast<pid_t>(node(k).DaemonStatus().pid());
      if (pid <= 0 || pid == node(k).daemon_pid()) continue;
      kill(pid, SIGTERM);
      EXPECT_TRUE(PollUntil([pid] { return kill(pid, 0) != 0; }));
    }
  }
  void StartKept() {
    WithCustodians();
    if (GetParam().gpus > 0) OnGpus(GetParam().gpus);
    Start(2, 1);
  }
  static Args Training(int steps) {
    return kOutlivesDaemons.With({{"strategy", GetParam().strategy}, {"steps", absl::StrCat(steps)}});
  }
  // Ranks store their steps themselves (pass_trainer.h).
  static Args InTrainers() {
    return {{"model", "pass"},  {"trainers_write", "1"}, {"trained", "adam"}, {"blocks", "3"},
            {"numel", "20011"}, {"midway", "1"},         {"by_groups", "1"}};
  }
  // Several optimizers, whose steps go in parts; `how`: as Args' "parts".
  static Args InParts(const char* how = "1") { return {{"parts", how}, {"momentum", "0"}, {"lr", "0.003"}}; }
  static Args OfMuon() { return {{"muon", "1"}, {"momentum", "0"}, {"lr", "0.003"}}; }
  // By `shardctl handover`, which returns when the next daemon listens.
  void HandOver(int k) {
    handed_over_ = true;
    const int64_t pid = node(k).DaemonStatus().pid();
    Child ctl = testing::Spawn({testing::ProgramPath("shardctl"), "handover", "--address=unix:" + node(k).socket()},
                               {.log = node(k).File("handover.log")});
    ASSERT_EQ(ctl.Wait(), 0) << "node " << k << ": " << testing::ReadWholeFile(node(k).File("handover.log"));
    EXPECT_NE(node(k).DaemonStatus().pid(), pid);
  }
  void ExpectBitsOfUndisturbed(const Args& args, std::vector<Child>& ranks) {
    for (int k = 0; k < count(); ++k) {
      // Of a long run many steps are left behind the last kill.
      EXPECT_EQ(ranks[static_cast<size_t>(k)].Wait(10 * testing::kLimit), 0)
          << k << testing::ReadWholeFile(absl::StrCat(node(k).Folder(args), "/log.0"));
    }
    for (const TrainerReport& report : Reports(args)) EXPECT_LE(report.waited_ms, args.Int("timeout_ms") + 1000);
    ExpectNothingChanged(args);
  }
  void ExpectAsUndisturbed(const Args& args, std::vector<Child>& ranks) {
    ExpectBitsOfUndisturbed(args, ranks);
    ExpectNothingLeft();
  }
  // Each daemon is told to end while ranks train, and gives its job to the next one.
  void ExpectStopsLoseNothing(const Args& more) {
    StartKept();
    const Args args = UntilEnough(Training(kUntilEnough).With(more));
    std::vector<Child> ranks = StartRanks(args);
    for (int k = 0; k < count(); ++k) {
      ASSERT_TRUE(AllTrained(20 * k + 20));
      ASSERT_NO_FATAL_FAILURE(ReplaceDaemon(k, SIGTERM));
    }
    SayEnough();
    ExpectAsUndisturbed(args, ranks);
    for (int k = 0; k < count(); ++k) EXPECT_EQ(Report(k, 0, args).Note("lost a step"), "") << "node " << k;
  }
  // Node 0 hears nothing of node 1's next daemon, where somebody closes the job; `then`, while that waits.
  std::vector<Child> CloseWhereItWasTakenUp(const std::function<void()>& then) {
    std::vector<Child> ranks = StartRanks(Training(1'000'000).With({{"recover", "0"}}));
    EXPECT_TRUE(AllTrained(5));
    EXPECT_EQ(kill(node(0).daemon_pid(), SIGSTOP), 0);
    ReplaceDaemon(1);
    std::thread closer([stub = &node(1).jobs()] {
      grpc::ClientContext context;
      v1::JobRef ref;
      ref.set_job("job");
      v1::CloseJobByNameResponse closed;
      const grpc::Status status = stub->CloseJobByName(&context, ref, &closed);
      EXPECT_TRUE(status.ok()) << status.error_message();
      EXPECT_TRUE(closed.existed());
    });
    absl::SleepFor(absl::Milliseconds(500));
    then();
    closer.join();
    return ranks;
  }
  // Its ranks' values are at node 0, and no version here yet.
  bool HasPromisedValues(int k) {
    const std::vector<v1::Event> events = node(k).Events();
    return !events.empty() &&
           events.back().text() == absl::StrCat("version ", node(k).Job().version() + 1, " is said to node 0");
  }
  void KillWhereRanksTrain(int kills, const Args& more = {}) {
    StartKept();
    const Args args = UntilEnough(Training(kUntilEnough).With(more));
    std::vector<Child> ranks = StartRanks(args);
    ASSERT_TRUE(AllTrained(2));
    std::mt19937 random(static_cast<unsigned>(testing::LongRun("SHARDD_DEATH_SEED", 23)));
    for (int kill = 0; kill < kills; ++kill) {
      absl::SleepFor(absl::Microseconds(1000 + random() % 60000));
      const int64_t before = LastStep();
      const unsigned which = random() % 5;  // 4: both
      for (int k = 0; k < count(); ++k) {
        if (which != 4 && static_cast<int>(which % 2) != k) continue;
        ReplaceDaemon(k);
        if (random() % 3 == 0) ReplaceDaemon(k);  // its successor, too
      }
      if (HasFatalFailure()) return;
      ASSERT_TRUE(AllTrained(before + 1)) << "kill " << kill << " of " << which;
    }
    SayEnough();
    ExpectAsUndisturbed(args, ranks);
  }

  bool handed_over_ = false;
};

TEST_P(NodesDeath, KillsAtAnyMomentLoseNothing) {
  SHARDD_NEEDS_GPUS(GetParam().gpus);
  KillWhereRanksTrain(Kills(GetParam().gpus));
}

// Node 1 stands still where node 0 measures or decides, so that many a step is decided of which the killed daemon has
// promised its part and heard nothing.
TEST_P(NodesDeath, KillsWhereNode0DecidesLoseNothing) {
  SHARDD_NEEDS_GPUS(GetParam().gpus);
  StartKept();
  const Args args = UntilEnough(Training(kUntilEnough));
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(AllTrained(2));
  std::mt19937 random(static_cast<unsigned>(testing::LongRun("SHARDD_DEATH_SEED", 29)));
  int kills = 0;
  for (int turn = 0; kills < 5 && turn < 2000; ++turn) {
    absl::SleepFor(absl::Microseconds(random() % 20000));
    const int64_t before = LastStep();
    const pid_t daemon = node(1).daemon_pid();
    ASSERT_EQ(kill(daemon, SIGSTOP), 0);
    absl::SleepFor(absl::Milliseconds(10));
    if (node(0).Job().state() != v1::JOB_STATE_COMMITTING) {
      ASSERT_EQ(kill(daemon, SIGCONT), 0);
      continue;
    }
    ASSERT_NO_FATAL_FAILURE(ReplaceDaemon(1));
    ASSERT_TRUE(AllTrained(before + 1)) << "kill " << kills;
    ++kills;
  }
  EXPECT_EQ(kills, 5);
  SayEnough();
  ExpectAsUndisturbed(args, ranks);
}

// Node 0 stands still where node 1 has promised what its ranks load, and hears of that behind the promising daemon's
// death.
TEST_P(NodesDeath, KillsBehindPromisedValuesLoseNothing) {
  SHARDD_NEEDS_GPUS(GetParam().gpus);
  StartKept();
  const Args args = UntilEnough(Training(kUntilEnough).With({{"load_every", "1"}}));
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(AllTrained(2));
  std::mt19937 random(static_cast<unsigned>(testing::LongRun("SHARDD_DEATH_SEED", 31)));
  int kills = 0;
  for (int turn = 0; kills < 5 && turn < 2000; ++turn) {
    absl::SleepFor(absl::Microseconds(random() % 20000));
    const int64_t before = LastStep();
    const pid_t node0 = node(0).daemon_pid();
    ASSERT_EQ(kill(node0, SIGSTOP), 0);
    absl::SleepFor(absl::Milliseconds(20));
    const bool promised = HasPromisedValues(1);
    if (promised) ReplaceDaemon(1);
    ASSERT_EQ(kill(node0, SIGCONT), 0);
    if (!promised) continue;
    if (HasFatalFailure()) return;
    ASSERT_TRUE(AllTrained(before + 1)) << "kill " << kills;
    ++kills;
  }
  EXPECT_EQ(kills, 5);
  SayEnough();
  ExpectAsUndisturbed(args, ranks);
}

TEST_P(NodesDeath, KillsWhereRanksLoadValuesLoseNothing) {
  SHARDD_NEEDS_GPUS(GetParam().gpus);
  KillWhereRanksTrain(GetParam().gpus > 0 ? Kills(1) : Kills(0) / 2, {{"load_every", "1"}});
}

TEST_P(NodesDeath, KillsWhereRanksEditInPlaceLoseNothing) {
  if (GetParam().gpus > 0) GTEST_SKIP() << "on CPUs";
  KillWhereRanksTrain(Kills(0) / 2, {{"load_every", "1"}, {"edits", "1"}, {"trainers_write", "1"}, {"wait_step", "1"}});
}

// Their steps and the values that they store are agreed on alike.
TEST_P(NodesDeath, KillsWhereRanksStepThemselvesLoseNothing) {
  SHARDD_NEEDS_GPUS(GetParam().gpus);
  KillWhereRanksTrain(GetParam().gpus > 0 ? Kills(1) : Kills(0) / 2, InTrainers());
}

// Parts of a step are put back on all nodes, or committed with it on all.
TEST_P(NodesDeath, KillsBetweenPartsOfStepsLoseNothing) {
  if (GetParam().gpus > 0) GTEST_SKIP() << "on CPUs";
  KillWhereRanksTrain(Kills(0) / 2, InParts().With({{"param_dtype", "bf16"}, {"max_norm", "0.1"}}));
}

TEST_P(NodesDeath, KillsWhereTheLastPartUpdatesNothingLoseNothing) {
  if (GetParam().gpus > 0) GTEST_SKIP() << "on CPUs";
  KillWhereRanksTrain(Kills(0) / 2, InParts("2"));
}

// A matrix is updated on one node, for all of them, in many items: also between these.
TEST_P(NodesDeath, KillsWhereMatricesAreUpdatedLoseNothing) {
  if (GetParam().gpus > 0) GTEST_SKIP() << "on CPUs";
  KillWhereRanksTrain(Kills(0) / 2, OfMuon().With({{"param_dtype", "bf16"}, {"max_norm", "0.1"}}));
}

TEST_P(NodesDeath, KillsBetweenMuonAndOtherOptimizersLoseNothing) {
  if (GetParam().gpus > 0) GTEST_SKIP() << "on CPUs";
  KillWhereRanksTrain(Kills(0) / 2, OfMuon().With(InParts()));
}

// All ranks have made a part of step 5, and wait: nobody has more than step 4 then, and all make the part again.
TEST_P(NodesDeath, ADaemonKilledBetweenTwoPartsTakesAllNodesBack) {
  if (GetParam().gpus > 0) GTEST_SKIP() << "on CPUs";
  StartKept();
  for (int killed = 0; killed < count(); ++killed) {
    const Args args = Training(9).With(InParts()).With({{"name", absl::StrCat("killed", killed)}});
    const Args paused = args.With({{"pause", "parted@4"}});
    std::vector<Child> ranks = StartRanks(paused);
    for (int k = 0; k < count(); ++k) node(k).AwaitPause(Of(k, paused), "parted", 0);
    ASSERT_NO_FATAL_FAILURE(ReplaceDaemon(killed));
    for (int k = 0; k < count(); ++k) {
      // Of what a successor has taken up it hears from node 0 that all have it.
      EXPECT_TRUE(PollUntil([&] { return node(k).Job(args.Text("name")).committed_step() == 4; })) << k;
      node(k).LetGo(Of(k, paused), "parted", 0);
    }
    ExpectAsUndisturbed(args, ranks);
  }
}

TEST_P(NodesDeath, ARankKilledBetweenTwoPartsTakesAllNodesBack) {
  if (GetParam().gpus > 0) GTEST_SKIP() << "on CPUs";
  StartKept();
  for (int killed = 0; killed < count(); ++killed) {
    const Args args = Training(9).With(InParts()).With({{"name", absl::StrCat("died", killed)}});
    const std::vector<TrainerReport> reports = RunWithADeath(args, "parted@4", killed, 0);
    ExpectSame(reports, RunAll(args.With({{"name", absl::StrCat("undisturbed", killed)}})));
  }
  ExpectNothingLeft();
}

// All nodes' epochs end behind one step.
TEST_P(NodesDeath, StoppingADaemonLosesNoStepOnAnyNode) {
  SHARDD_NEEDS_GPUS(GetParam().gpus);
  ExpectStopsLoseNothing({});
}

// The next daemon listens for other nodes where the one before it did, while that is still there.
TEST_P(NodesDeath, HandingOverADaemonLosesNoStepOnAnyNode) {
  SHARDD_NEEDS_GPUS(GetParam().gpus);
  StartKept();
  const Args args = UntilEnough(Training(kUntilEnough));
  std::vector<Child> ranks = StartRanks(args);
  const int turns = GetParam().gpus > 0 ? count() : 2 * count();  // daemons on GPUs take long to begin
  for (int turn = 0; turn < turns; ++turn) {
    ASSERT_TRUE(AllTrained(20 * turn + 10));
    ASSERT_NO_FATAL_FAILURE(HandOver((turn + 1) % count()));
  }
  EXPECT_FALSE(ranks[0].Ended());
  SayEnough();
  ExpectBitsOfUndisturbed(args, ranks);
  for (int k = 0; k < count(); ++k) EXPECT_EQ(Report(k, 0, args).Note("lost a step"), "") << "node " << k;
}

TEST_P(NodesDeath, StoppingADaemonLosesNoPartOfAStep) {
  if (GetParam().gpus > 0) GTEST_SKIP() << "on CPUs";
  ExpectStopsLoseNothing(InParts());
}

TEST_P(NodesDeath, StoppingADaemonLosesNoStepThatRanksMake) {
  SHARDD_NEEDS_GPUS(GetParam().gpus);
  ExpectStopsLoseNothing(InTrainers());
}

// Its new links are not there yet, so whoever closes it waits until the others hear that.
TEST_P(NodesDeath, AJobClosedWhereItWasTakenUpEndsOnAllNodes) {
  if (GetParam().gpus > 0) GTEST_SKIP() << "on CPUs";
  StartKept();
  std::vector<Child> ranks = CloseWhereItWasTakenUp([this] { ASSERT_EQ(kill(node(0).daemon_pid(), SIGCONT), 0); });
  for (Child& rank : ranks) rank.Wait();
  for (int k = 0; k < count(); ++k) EXPECT_TRUE(PollUntil([&] { return node(k).Job().name().empty(); })) << k;
}

TEST_P(NodesDeath, AJobWhoseCloseWaitsIsNothingForTheNextDaemon) {
  if (GetParam().gpus > 0) GTEST_SKIP() << "on CPUs";
  StartKept();
  std::vector<Child> ranks = CloseWhereItWasTakenUp([this] { ASSERT_EQ(kill(node(1).daemon_pid(), SIGTERM), 0); });
  // It ends by itself: a second signal would end it at once.
  ASSERT_NO_FATAL_FAILURE(ReplaceDaemon(1, /*signal_number=*/0));
  EXPECT_EQ(node(1).Job().name(), "");
  ASSERT_EQ(kill(node(0).daemon_pid(), SIGCONT), 0);
  for (Child& rank : ranks) rank.Kill(SIGKILL);
}

class NodesFinished : public Nodes {};

// The others gather what it holds until theirs have finished, too; its successor hears of no rank any more. The links
// of the job are authenticated with a secret, which the successor has from the custodian alone.
TEST_F(NodesFinished, ADaemonOfFinishedRanksServesOthersBeyondItsDeath) {
  WithCustodians();
  Start(2, 1);
  for (int k = 0; k < count(); ++k) node(k).RanksFind({"SHARDD_JOB_SECRET=between us alone, and nobody else"});
  const Args args = Args(
      {{"strategy", "FULL_SHARD"}, {"steps", "5"}, {"optimizer", "adamw"}, {"grace_ms", "2000"}, {"recover", "1"}});
  Child other = StartRank(0, 0, args.With({{"pause", "end@5"}}));
  Child first = StartRank(1, 0, args);
  node(0).AwaitPause(Of(0, args), "end", 0);
  ASSERT_EQ(first.Wait(), 0);
  ASSERT_NO_FATAL_FAILURE(ReplaceDaemon(1));
  absl::SleepFor(absl::Seconds(4));  // longer than the grace time of a job without ranks
  EXPECT_EQ(node(1).Job().committed_step(), 5);
  node(0).LetGo(Of(0, args), "end", 0);
  EXPECT_EQ(other.Wait(), 0);
  ExpectAllOk({Report(0, 0, args)});
  for (int k = 0; k < count(); ++k) EXPECT_TRUE(PollUntil([&] { return node(k).Job().name().empty(); })) << k;
}

INSTANTIATE_TEST_SUITE_P(Jobs, NodesDeath,
                         ::testing::Values(NodesCase{"Cut", "FULL_SHARD", 0}, NodesCase{"Replicas", "HYBRID_SHARD", 0},
                                           NodesCase{"ReplicasOnGpus", "HYBRID_SHARD", 1},
                                           NodesCase{"CutOnGpus", "FULL_SHARD", 1}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace shardd::e2e
