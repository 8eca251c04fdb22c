// Jobs over rows of nodes whose daemons are lost with all that they had: another daemon in the place is sent what it
// held by the node with its place in another row, and the job ends with the bits of a run that nothing has disturbed.

#include <signal.h>

#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/e2e/nodes/nodes.h"
#include "tests/testing/fake_cuda.h"
#include "tests/testing/long_run.h"
#include "tests/testing/poll.h"

namespace shardd::e2e {
namespace {

using testing::Child;

// Rows of two nodes, each with one rank.
Args Training(int steps, const Args& more = {}) {
  return kOutlivesDaemons
      .With({{"strategy", "HYBRID_SHARD"}, {"world", "1"}, {"group_size", "2"}, {"steps", absl::StrCat(steps)}})
      .With(more);
}

class NodesRowsLost : public Nodes {
 protected:
  void StartRanks(const Args& args) {
    ranks_.resize(static_cast<size_t>(count()));
    for (int k = 0; k < count(); ++k) ranks_[static_cast<size_t>(k)].push_back(StartRank(k, 0, args));
  }
  Child& RankOf(int node) { return ranks_[static_cast<size_t>(node)].back(); }
  // With their ranks, all at once.
  void Lose(const std::vector<int>& nodes) {
    for (const int k : nodes) ASSERT_EQ(kill(node(k).daemon_pid(), SIGKILL), 0);
    for (const int k : nodes) {
      RankOf(k).Kill(SIGKILL);
      RankOf(k).Wait();
      node(k).WaitForDaemon();
    }
  }
  // On machines that know nothing of the job.
  void Replace(const std::vector<int>& nodes, const Args& args) {
    for (const int k : nodes) StartAgain(k);
    for (const int k : nodes) ranks_[static_cast<size_t>(k)].push_back(StartRank(k, 0, args));
  }
  void LoseAndGoOn(const std::vector<int>& nodes, const Args& args) {
    const int64_t before = LastStep();
    ASSERT_NO_FATAL_FAILURE(Lose(nodes));
    ASSERT_NO_FATAL_FAILURE(Replace(nodes, args));
    ASSERT_TRUE(AllTrained(before + 1)) << "lost node " << nodes[0] << " behind step " << before;
    for (const int k : nodes) EXPECT_TRUE(node(k).HasEvent("job", "state", "came from node")) << k;
  }
  // REQUIRES: ranks were started with UntilEnough.
  void ExpectAsUndisturbed(const Args& args) {
    EXPECT_FALSE(RankOf(0).Ended());
    SayEnough();
    for (int k = 0; k < count(); ++k) {
      EXPECT_EQ(RankOf(k).Wait(10 * testing::kLimit), 0) << k;
    }
    ExpectNothingChanged(args);
  }

  std::vector<std::vector<Child>> ranks_;  // of each node, one after the other
};

TEST_F(NodesRowsLost, EachNodeInItsTurnIsSentWhatItHeld) {
  Start(4, 1);
  const Args args = UntilEnough(Training(kUntilEnough));
  StartRanks(args);
  ASSERT_TRUE(AllTrained(2));
  for (const int k : {3, 0, 2, 1}) {
    ASSERT_NO_FATAL_FAILURE(LoseAndGoOn({k}, args));
    EXPECT_TRUE(node(k).HasEvent("job", "state", absl::StrCat("came from node ", (k + 2) % 4)));
  }
  ExpectAsUndisturbed(args);
}

TEST_F(NodesRowsLost, EachNodeWithAGpuIsSentWhatItHeld) {
  SHARDD_NEEDS_GPUS(1);
  OnGpus(1);
  Start(4, 1);
  const Args args = UntilEnough(Training(kUntilEnough));
  StartRanks(args);
  ASSERT_TRUE(AllTrained(2));
  for (const int k : {3, 0}) ASSERT_NO_FATAL_FAILURE(LoseAndGoOn({k}, args));
  ASSERT_NO_FATAL_FAILURE(LoseAndGoOn({0, 1}, args));
  ExpectAsUndisturbed(args);
}

TEST_F(NodesRowsLost, EachRowInItsTurnIsSentWhatItHeld) {
  Start(4, 1);
  const Args args = UntilEnough(Training(kUntilEnough));
  StartRanks(args);
  ASSERT_TRUE(AllTrained(2));
  ASSERT_NO_FATAL_FAILURE(LoseAndGoOn({0, 1}, args));
  ASSERT_NO_FATAL_FAILURE(LoseAndGoOn({2, 3}, args));
  ExpectAsUndisturbed(args);
}

TEST_F(NodesRowsLost, TwoOfThreeNodesWithAPlaceAreSentTheThirds) {
  Start(6, 1);
  const Args args = UntilEnough(Training(kUntilEnough));
  StartRanks(args);
  ASSERT_TRUE(AllTrained(2));
  ASSERT_NO_FATAL_FAILURE(LoseAndGoOn({1, 5}, args));
  ASSERT_NO_FATAL_FAILURE(LoseAndGoOn({0, 3, 4}, args));
  ExpectAsUndisturbed(args);
}

TEST_F(NodesRowsLost, APlaceThatIsLostInAllRowsEndsTheJobByName) {
  Start(4, 1);
  const Args args = Training(400, {{"timeout_ms", "20000"}});
  StartRanks(args);
  ASSERT_TRUE(AllTrained(2));
  ASSERT_NO_FATAL_FAILURE(Lose({1, 3}));
  ASSERT_NO_FATAL_FAILURE(Replace({1, 3}, args.With({{"recover", "0"}})));
  std::string all;
  for (int k = 0; k < 4; ++k) {
    EXPECT_EQ(RankOf(k).Wait(), 0);
    absl::StrAppend(&all, Report(k, 0, args).message, "\n");
  }
  EXPECT_TRUE(absl::StrContains(all, "What its ranks held has been in other rows on node ")) << all;
}

TEST_F(NodesRowsLost, WhereTrainersStepThemselvesTheJobEndsByName) {
  Start(4, 1);
  const Args args = Training(400, {{"timeout_ms", "20000"},
                                   {"model", "pass"},
                                   {"trainers_write", "1"},
                                   {"trained", "adam"},
                                   {"blocks", "3"},
                                   {"numel", "20011"},
                                   {"midway", "1"},
                                   {"by_groups", "1"}});
  StartRanks(args);
  ASSERT_TRUE(AllTrained(2));
  ASSERT_NO_FATAL_FAILURE(Lose({3}));
  ASSERT_NO_FATAL_FAILURE(Replace({3}, args.With({{"recover", "0"}})));
  std::string all;
  for (int k = 0; k < 4; ++k) {
    EXPECT_EQ(RankOf(k).Wait(), 0);
    absl::StrAppend(&all, Report(k, 0, args).message, "\n");
  }
  EXPECT_TRUE(absl::StrContains(all, "does not send it where optimizers step in the trainers")) << all;
}

struct StateKind {
  const char* name;
  Args more;
};

// What the state consists of, and what is under way when a daemon is lost.
class NodesRowsLostKinds : public NodesRowsLost, public ::testing::WithParamInterface<StateKind> {};

TEST_P(NodesRowsLostKinds, AtAnyMomentNothingIsLost) {
  Start(4, 1);
  const int losses = testing::LongRun("SHARDD_DEATHS", 5);
  const Args args = UntilEnough(Training(kUntilEnough, GetParam().more));
  StartRanks(args);
  ASSERT_TRUE(AllTrained(2));
  std::mt19937 random(static_cast<unsigned>(testing::LongRun("SHARDD_DEATH_SEED", 11)));
  for (int lost = 0; lost < losses; ++lost) {
    absl::SleepFor(absl::Microseconds(1000 + random() % 60000));
    const int k = static_cast<int>(random() % 4);
    ASSERT_NO_FATAL_FAILURE(LoseAndGoOn(random() % 4 == 0 ? std::vector<int>{k, k ^ 1} : std::vector<int>{k}, args));
  }
  ExpectAsUndisturbed(args);
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, NodesRowsLostKinds,
    ::testing::Values(StateKind{"Dim0Bf16", {{"layout", "DIM0"}, {"param_dtype", "bf16"}, {"max_norm", "0.1"}}},
                      StateKind{"Loads", {{"load_every", "1"}}},
                      StateKind{"Edits",
                                {{"load_every", "1"}, {"edits", "1"}, {"trainers_write", "1"}, {"wait_step", "1"}}},
                      StateKind{"Parts", {{"parts", "1"}, {"momentum", "0"}, {"lr", "0.003"}}}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace shardd::e2e
