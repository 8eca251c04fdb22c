// Ranks of all nodes edit parameters in place between steps of the daemon's optimizer, where nodes are replicas and
// where parameters are cut over them: what they have stored is a version on all nodes or on none, whoever dies.

#include <signal.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/e2e/nodes/nodes.h"

namespace shardd::e2e {
namespace {

using testing::Child;

struct EditsCase {
  const char* name;
  const char* strategy;
  const char* edits;  // trainer.h
};

class NodesEdits : public Nodes, public ::testing::WithParamInterface<EditsCase> {
 protected:
  static Args Training(const Args& more = {}) {
    return Args({{"strategy", GetParam().strategy},
                 {"steps", "10"},
                 {"load_every", "3"},
                 {"edits", GetParam().edits},
                 {"trainers_write", "1"},
                 {"wait_step", "1"},
                 {"recover", "1"},
                 {"optimizer", "adamw"},
                 {"bits", "1"}})
        .With(more);
  }
  bool at_once() const { return GetParam().edits == std::string("2"); }
  // Where what was edited before step 6 is a version.
  std::string committed() const { return at_once() ? "load_ended@6" : "entered@6"; }
  void ExpectAsOnOneNode(int nodes, int ranks) {
    Start(nodes, ranks);
    const Args args = Training();
    std::vector<v1::Job> jobs;
    const std::vector<TrainerReport> reports = RunAll(args, {}, [&] { jobs = Jobs(); });
    ExpectAllOk(reports);
    for (const v1::Job& job : jobs) {
      EXPECT_EQ(job.version(), 1u + 10u + 3u) << "initial values, steps and edits";
      EXPECT_EQ(job.counters().aborts(), 0u);
    }
    const Args alone = args.With({{"name", "alone"}, {"strategy", "FULL_SHARD"}, {"first_rank", "0"}})
                           .With({{"world", absl::StrCat(nodes * ranks)}, {"node", "0"}, {"nodes", ""}});
    const std::vector<TrainerReport> wanted = RunOnNode0(alone);
    for (int rank = 0; rank < nodes * ranks; ++rank) {
      const TrainerReport& want = wanted[static_cast<size_t>(rank)];
      const TrainerReport& got = reports[static_cast<size_t>(rank)];
      for (int step = 0; step < 10; ++step) EXPECT_NEAR(got.losses.at(step), want.losses.at(step), 1e-5) << rank;
      for (int p = 0; p < kParamCount; ++p) {
        for (int i = 0; i < kNumel[p]; ++i) EXPECT_NEAR(got.values[p][i], want.values[p][i], 1e-5) << rank << " " << p;
      }
      EXPECT_EQ(got.values, reports[0].values);
    }
  }
  void KillAndReplace(const std::string& moment, const std::string& note, const Args& more = {}) {
    Start(2);
    const Args args = Training(more);
    const std::vector<TrainerReport> reports = RunWithADeath(args, moment, /*on=*/1, /*dies=*/1);
    for (const TrainerReport& report : reports) {
      EXPECT_EQ(report.Note("loaded 6") + report.Note("taken back 6"), note) << report.Note("aborted");
    }
    ExpectSame(reports, RunAll(args.With({{"name", "undisturbed"}})));
  }
  // Daemons die when a rank of node 1 has seen that what was edited is a version.
  void KillDaemonsBehindTheCommit(const std::vector<int>& nodes, const Args& more) {
    Start(2, 1);
    const std::string moment = committed();
    const Args args = Training({{"silence_ms", "30000"}}).With(more);
    std::vector<Child> ranks;
    ranks.push_back(StartRank(0, 0, args));
    const Args stops = args.With({{"pause", moment}});
    ranks.push_back(StartRank(1, 0, stops));
    const std::string name = moment.substr(0, moment.find('@'));
    node(1).AwaitPause(Of(1, stops), name, 0);
    for (const int k : nodes) ASSERT_NO_FATAL_FAILURE(ReplaceDaemon(k));
    node(1).LetGo(Of(1, stops), name, 0);
    for (Child& rank : ranks) EXPECT_EQ(rank.Wait(2 * testing::kLimit), 0);
    const std::vector<TrainerReport> reports = Reports(args);
    ExpectAllOk(reports);
    for (const TrainerReport& report : reports)
      EXPECT_EQ(report.Note("loaded 6"), "loaded 6") << report.Note("aborted");
    ExpectSame(reports, RunAll(args.With({{"name", "undisturbed"}})));
  }
};

TEST_P(NodesEdits, TrainingGoesOnAsOnOneNode) { ExpectAsOnOneNode(2, 2); }
TEST_P(NodesEdits, ThreeNodesTrainAsOne) { ExpectAsOnOneNode(3, 1); }

TEST_P(NodesEdits, ARankThatDiesWithItsEditTakesItBack) { KillAndReplace("loaded@6", "taken back 6"); }
TEST_P(NodesEdits, ARankDiesBehindTheCommit) { KillAndReplace(committed(), "loaded 6"); }

// On all nodes or on none, and the bits at the end are the same.
TEST_P(NodesEdits, ARankDiesSomewhereInTheCommit) {
  Start(2);
  for (const int late_us : {100, 300, 600, 1000, 2000, 4000}) {
    const Args args = Training({{"name", absl::StrCat("late", late_us)}, {"kill_late_us", absl::StrCat(late_us)}});
    const std::vector<TrainerReport> reports = RunWithADeath(args, "loaded@6", 1, late_us / 100 % 2);
    for (const TrainerReport& report : reports) {
      EXPECT_EQ(report.Note("loaded 6") + report.Note("taken back 6"),
                reports[0].Note("loaded 6") + reports[0].Note("taken back 6"))
          << late_us;
    }
    ExpectSame(reports, RunAll(Training({{"name", absl::StrCat("undisturbed", late_us)}})));
  }
}

TEST_P(NodesEdits, ADaemonThatIsKeptDiesBehindTheCommit) {
  WithCustodians();
  KillDaemonsBehindTheCommit({1}, {});
  ExpectNothingLeft();
}

TEST_P(NodesEdits, Node0sDaemonThatIsKeptDiesBehindTheCommit) {
  WithCustodians();
  KillDaemonsBehindTheCommit({0}, {});
  ExpectNothingLeft();
}

TEST_P(NodesEdits, AllDaemonsThatAreKeptDieBehindTheCommit) {
  WithCustodians();
  KillDaemonsBehindTheCommit({1, 0}, {});
  ExpectNothingLeft();
}

// It is sent what was edited with the state.
TEST_P(NodesEdits, AReplicasDaemonDiesBehindTheCommit) {
  if (GetParam().strategy != std::string("HYBRID_SHARD")) GTEST_SKIP() << "nobody else has its part";
  KillDaemonsBehindTheCommit({1}, {{"of_any_rank", "1"}, {"outlive_daemon", "1"}});
}

INSTANTIATE_TEST_SUITE_P(Jobs, NodesEdits,
                         ::testing::Values(EditsCase{"Cut", "FULL_SHARD", "1"},
                                           EditsCase{"CutAtOnce", "FULL_SHARD", "2"},
                                           EditsCase{"Replicas", "HYBRID_SHARD", "1"},
                                           EditsCase{"ReplicasAtOnce", "HYBRID_SHARD", "2"}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace shardd::e2e
