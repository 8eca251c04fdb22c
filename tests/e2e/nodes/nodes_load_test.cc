// Ranks of all nodes load values between steps, where nodes are replicas and where parameters are cut over them: what
// is loaded is a version on all nodes or on none, whoever dies meanwhile.

#include <signal.h>

#include <algorithm>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/nodes/nodes.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

struct LoadCase {
  const char* name;
  const char* strategy;
  int gpus;  // of each node; 0: CPUs
};

class NodesLoad : public Nodes, public ::testing::WithParamInterface<LoadCase> {
 protected:
  void SetUp() override {
    if (GetParam().gpus == 0) return;
    SHARDD_NEEDS_GPUS(GetParam().gpus);
    OnGpus(GetParam().gpus);
  }
  static Args Training(const Args& more = {}) {
    return Args({{"strategy", GetParam().strategy},
                 {"steps", "10"},
                 {"load_every", "3"},
                 {"recover", "1"},
                 {"optimizer", "adamw"},
                 {"bits", "1"}})
        .With(more);
  }
  void KillAndReplace(const std::string& moment, int on, int dies) {
    Start(2);
    const Args args = Training();
    const std::vector<TrainerReport> reports = RunWithADeath(args, moment, on, dies);
    for (const TrainerReport& report : reports) {
      EXPECT_EQ(report.Note("loaded 6") + report.Note("taken back 6"),
                reports[0].Note("loaded 6") + reports[0].Note("taken back 6"));
    }
    ExpectSame(reports, RunAll(args.With({{"name", "undisturbed"}})));
  }
  std::vector<TrainerReport> OnOneNode(const Args& args) {
    const Args own = args.With({{"strategy", "FULL_SHARD"}, {"device_memory", GetParam().gpus > 0 ? "1" : "0"}});
    return RunOnNode0(own);
  }
  // What the only rank of a node waits for.
  std::string WaitsOf(int node) {
    const auto ranks = this->node(node).Ranks();
    return ranks.empty() ? "" : ranks[0].waiting_for();
  }
};

TEST_P(NodesLoad, TrainingGoesOnAsOnOneNode) {
  Start(2, 2);
  const Args args = Training();
  std::vector<v1::Job> jobs;
  const std::vector<TrainerReport> reports = RunAll(args, {}, [&] { jobs = Jobs(); });
  ExpectAllOk(reports);
  for (const v1::Job& job : jobs) {
    EXPECT_EQ(job.version(), 1u + 10u + 3u) << "initial values, steps and loads";
    EXPECT_EQ(job.counters().aborts(), 0u);
  }
  for (const TrainerReport& report : reports) EXPECT_EQ(report.values, reports[0].values);
  ExpectSame(RunAll(args.With({{"name", "again"}})), reports);
  // One node with as many ranks.
  const std::vector<TrainerReport> want = OnOneNode(args.With({{"name", "alone"}, {"world", "4"}}));
  for (size_t rank = 0; rank < want.size(); ++rank) {
    for (int step = 0; step < 10; ++step) {
      EXPECT_NEAR(reports[rank].losses.at(step), want[rank].losses.at(step), 1e-5) << rank << " " << step;
    }
    for (int p = 0; p < kParamCount; ++p) {
      for (int i = 0; i < kNumel[p]; ++i) EXPECT_NEAR(reports[rank].values[p][i], want[rank].values[p][i], 1e-5) << p;
    }
  }
}

TEST_P(NodesLoad, ARankDiesInTheMiddleOfALoad) { KillAndReplace("load@6", 1, 0); }
TEST_P(NodesLoad, ARankDiesBetweenItsLastWriteAndTheCommit) { KillAndReplace("loaded@6", 0, 1); }
TEST_P(NodesLoad, ARankDiesWhereOthersAskToLoad) { KillAndReplace("loads@6", 1, 1); }
TEST_P(NodesLoad, ARankDiesBehindALoad) { KillAndReplace("load_ended@6", 1, 1); }

// Others' writes wait for a node that still gathers the version before, which it reads as it was.
TEST_P(NodesLoad, ANodeThatStillReadsSeesTheVersionBefore) {
  Start(2, 1);
  const Args args = Training({{"steps", "4"}, {"load_every", "2"}, {"silence_ms", "30000"}});
  Child loads = StartRank(0, 0, args);
  Child reads = StartRank(1, 0, args.With({{"reads_first", "1"}, {"pause", "reads_first"}}));
  const auto come = [&] {
    node(1).AwaitPause(Of(1, args), "reads_first", 0);
    if (GetParam().strategy == std::string("FULL_SHARD")) {
      const std::string waits =
          absl::StrCat("node 1 (", addresses()[1], ") has not asked to write values, which all nodes do together");
      EXPECT_TRUE(PollUntil([&] { return WaitsOf(0) == waits; })) << WaitsOf(0);
    }
    node(1).LetGo(Of(1, args), "reads_first", 0);
  };
  for (int group = 0; group < kGroupCount; ++group) come();
  EXPECT_EQ(loads.Wait(), 0);
  EXPECT_EQ(reads.Wait(), 0);
  const std::vector<TrainerReport> reports = Reports(args);
  ExpectAllOk(reports);
  const std::vector<TrainerReport> plain = RunAll(args.With({{"steps", "2"}, {"name", "plain"}}));
  EXPECT_EQ(reports[1].Note("read"), "read " + std::to_string(plain[1].values[kB1].front()));
  ExpectSame(reports, RunAll(args.With({{"name", "undisturbed"}})));
}

// Of each node one rank. What is loaded before step 6 is version 9: the initial values, six steps, two loads.
class NodesLoadDeath : public Nodes {
 protected:
  void SetUp() override {
    WithCustodians();
    Start(2, 1);
  }
  // The rank of `late` has written, and the other node has said its values.
  void StopBeforeTheLastCommit(int late) {
    for (int k = 0; k < 2; ++k) {
      ranks_.push_back(StartRank(k, 0, k == late ? args_.With({{"pause", "loaded@6"}}) : args_));
    }
    node(late).AwaitPause(Of(late, args_), "loaded", 0);
    const int other = 1 - late;
    ASSERT_TRUE(PollUntil([&] { return node(other).HasEvent("job", "parameters", "version 9 is said to node 0"); }));
  }
  void LetGo(int late) { node(late).LetGo(Of(late, args_), "loaded", 0); }
  // Ranks of node 0 have seen the version when the daemon of node 1, which has not heard of it, is replaced.
  void ReplaceNode1BeforeItHears() {
    ASSERT_NO_FATAL_FAILURE(StopBeforeTheLastCommit(/*late=*/0));
    ASSERT_EQ(kill(node(1).daemon_pid(), SIGSTOP), 0);
    LetGo(0);
    ASSERT_TRUE(PollUntil([&] { return node(0).Job().version() == 9; }));
    ASSERT_NO_FATAL_FAILURE(ReplaceDaemon(1));
  }
  void ExpectAsUndisturbed(const std::string& note) {
    for (Child& rank : ranks_) EXPECT_EQ(rank.Wait(), 0);
    for (const TrainerReport& report : Reports(args_)) EXPECT_EQ(report.Note(note), note) << report.Note("aborted");
    ExpectNothingChanged(args_);
    ExpectNothingLeft();
  }

  const Args args_ = {{"strategy", "FULL_SHARD"}, {"steps", "10"},         {"load_every", "3"}, {"recover", "1"},
                      {"optimizer", "adamw"},     {"silence_ms", "30000"}, {"bits", "1"}};
  std::vector<Child> ranks_;
};

TEST_F(NodesLoadDeath, ADaemonThatHasPromisedTakesBackWhatNobodyHas) {
  ASSERT_NO_FATAL_FAILURE(StopBeforeTheLastCommit(/*late=*/0));
  ASSERT_NO_FATAL_FAILURE(ReplaceDaemon(1));
  LetGo(0);
  ExpectAsUndisturbed("taken back 6");
}

TEST_F(NodesLoadDeath, Node0sDaemonThatHasPromisedTakesBackWhatNobodyHas) {
  ASSERT_NO_FATAL_FAILURE(StopBeforeTheLastCommit(/*late=*/1));
  ASSERT_NO_FATAL_FAILURE(ReplaceDaemon(0));
  LetGo(1);
  ExpectAsUndisturbed("taken back 6");
}

// Ranks of node 0 have seen the version, and node 1 has its part of it alone.
TEST_F(NodesLoadDeath, WhatIsAgreedOnOutlivesADaemonThatHasNotHeard) {
  ASSERT_NO_FATAL_FAILURE(ReplaceNode1BeforeItHears());
  ExpectAsUndisturbed("loaded 6");
}

TEST_F(NodesLoadDeath, WhatIsAgreedOnOutlivesAllDaemons) {
  ASSERT_NO_FATAL_FAILURE(ReplaceNode1BeforeItHears());
  ASSERT_NO_FATAL_FAILURE(ReplaceDaemon(0));
  ExpectAsUndisturbed("loaded 6");
}

INSTANTIATE_TEST_SUITE_P(Jobs, NodesLoad,
                         ::testing::Values(LoadCase{"Cut", "FULL_SHARD", 0}, LoadCase{"Replicas", "HYBRID_SHARD", 0},
                                           LoadCase{"CutOnGpus", "FULL_SHARD", 2}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace shardd::e2e
