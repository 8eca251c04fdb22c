// Nodes of one job in random schedules of trouble: what one commits all commit, once, in the same order and of the same
// sums; what is given up is given up by all; and all train again when the trouble ends.

#include "server/multinode/node_member.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/server/multinode/node_world.h"
#include "tests/server/multinode/seeds.h"
#include "tests/testing/long_run.h"

namespace shardd {
namespace {

using testing::NodeWorld;

class NodeMemberSchedules : public ::testing::TestWithParam<int> {};

TEST_P(NodeMemberSchedules, AllNodesCommitTheSameAndTrainOn) {
  int ended_behind_step = 0;
  for (uint64_t seed = 1; seed <= 1500; seed += testing::kSeedStride) {
    NodeWorld world(GetParam(), seed, /*allow_missing=*/seed % 2 == 0, {});
    const std::string failure = world.Run(/*events=*/static_cast<int>(50 + seed % 900));
    ASSERT_EQ(failure, "") << "seed " << seed;
    ended_behind_step += world.ended_behind_step();
  }
  EXPECT_GT(ended_behind_step, testing::InAll(20));
}

TEST_P(NodeMemberSchedules, WithoutTroubleNothingIsGivenUp) {
  for (uint64_t seed = 1; seed <= 200; seed += testing::kSeedStride) {
    NodeWorld world(GetParam(), seed, /*allow_missing=*/seed % 2 == 0, {});
    ASSERT_EQ(world.Run(/*events=*/1), "") << "seed " << seed;
  }
}

TEST_P(NodeMemberSchedules, DaemonsThatAreLostTakeNothingAlongThatAnotherHas) {
  int recoveries = 0;
  int carried_over = 0;
  for (uint64_t seed = 1; seed <= 1500; seed += testing::kSeedStride) {
    NodeWorld world(GetParam(), seed, /*allow_missing=*/seed % 2 == 0, {.daemons_die = true});
    const std::string failure = world.Run(/*events=*/static_cast<int>(300 + seed % 1700));
    ASSERT_EQ(failure, "") << "seed " << seed;
    recoveries += world.recoveries();
    carried_over += world.carried_over();
  }
  EXPECT_GT(recoveries, testing::InAll(100));
  if (GetParam() == 2) {
    EXPECT_EQ(carried_over, 0) << "nobody is left who could have committed it";
  } else {
    EXPECT_GT(carried_over, testing::InAll(0));
  }
}

// Some come with nothing and some with what a custodian has kept, promises included.
TEST_P(NodeMemberSchedules, DaemonsThatAreTakenUpGoOnBesideLostOnes) {
  int taken_up = 0;
  int carried_over = 0;
  for (uint64_t seed = 1; seed <= 1500; seed += testing::kSeedStride) {
    NodeWorld world(GetParam(), seed, /*allow_missing=*/seed % 2 == 0, {.daemons_die = true, .custodians = true});
    ASSERT_EQ(world.Run(/*events=*/static_cast<int>(300 + seed % 1700)), "") << "seed " << seed;
    taken_up += world.taken_up();
    carried_over += world.carried_over();
  }
  EXPECT_GT(taken_up, testing::InAll(500));
  EXPECT_GT(carried_over, testing::InAll(0));
}

TEST_P(NodeMemberSchedules, DaemonsThatDieLoseNothingThatIsCutOverNodes) {
  int taken_up = 0;
  int promises = 0;
  int loads = 0;
  int loads_carried_over = 0;
  int parts = 0;
  for (uint64_t seed = 1; seed <= 1500; seed += testing::kSeedStride) {
    NodeWorld world(GetParam(), seed, /*allow_missing=*/seed % 2 == 0,
                    {.daemons_die = true, .custodians = true, .cut = true});
    ASSERT_EQ(world.Run(/*events=*/static_cast<int>(300 + seed % 1700)), "") << "seed " << seed;
    taken_up += world.taken_up();
    promises += world.promises_taken_up();
    loads += world.loads_taken_up();
    loads_carried_over += world.loads_carried_over();
    parts += world.parts_made();
  }
  EXPECT_GT(taken_up, testing::InAll(1000));
  EXPECT_GT(promises, testing::InAll(50));
  EXPECT_GT(loads, testing::InAll(50));
  EXPECT_GT(loads_carried_over, testing::InAll(20));
  EXPECT_GT(parts, testing::InAll(1000));
}

// Nobody could send a node a step whose promise it has given up.
TEST_P(NodeMemberSchedules, WithParametersCutOverNodesPromisesOutlastAnySilence) {
  for (uint64_t seed = 1; seed <= 1000; seed += testing::kSeedStride) {
    NodeWorld world(GetParam(), seed, /*allow_missing=*/seed % 2 == 0, {.cut = true});
    ASSERT_EQ(world.Run(/*events=*/static_cast<int>(50 + seed % 900)), "") << "seed " << seed;
  }
}

// Two rows of two: all nodes agree as where they are one row.
TEST(NodeMemberRows, DaemonsThatDieLoseNothingOfAnyRow) {
  int taken_up = 0;
  int promises = 0;
  int loads = 0;
  for (uint64_t seed = 1; seed <= 800; seed += testing::kSeedStride) {
    NodeWorld world(4, seed, /*allow_missing=*/seed % 2 == 0,
                    {.daemons_die = true, .custodians = true, .cut = true, .row = 2, .extends = seed % 4 == 0});
    ASSERT_EQ(world.Run(/*events=*/static_cast<int>(1000 + 3 * (seed % 1700))), "") << "seed " << seed;
    taken_up += world.taken_up();
    promises += world.promises_taken_up();
    loads += world.loads_taken_up();
  }
  EXPECT_GT(taken_up, testing::InAll(500));
  EXPECT_GT(promises, testing::InAll(25));
  EXPECT_GT(loads, testing::InAll(25));
}

TEST(NodeMemberRows, WithoutDeathsAllTrainWhateverLinksAndRanksDo) {
  for (uint64_t seed = 1; seed <= 600; seed += testing::kSeedStride) {
    NodeWorld world(6, seed, /*allow_missing=*/seed % 2 == 0, {.cut = true, .row = seed % 3 == 0 ? 3 : 2});
    ASSERT_EQ(world.Run(/*events=*/static_cast<int>(50 + seed % 900)), "") << "seed " << seed;
  }
}

// A node that misses the last word meets the others, which have heard it.
TEST_P(NodeMemberSchedules, MoreIsTrainedBetweenTheSameTwoStepsWhateverDies) {
  for (const bool cut : {false, true}) {
    int extended = 0;
    int widened = 0;
    const int seeds = testing::LongRun("SHARDD_SCHEDULES", 1000);
    for (uint64_t seed = 1; seed <= static_cast<uint64_t>(seeds); seed += testing::kSeedStride) {
      NodeWorld world(GetParam(), seed, /*allow_missing=*/seed % 2 == 0,
                      {.daemons_die = true, .custodians = cut || seed % 3 != 0, .cut = cut, .extends = true});
      ASSERT_EQ(world.Run(/*events=*/static_cast<int>(300 + seed % 1700)), "") << "seed " << seed << ", cut " << cut;
      extended += world.extended();
      widened += world.widened();
    }
    EXPECT_GT(extended, testing::InAll(seeds)) << cut;
    EXPECT_GT(widened, testing::InAll(seeds / 10)) << cut;
  }
}

INSTANTIATE_TEST_SUITE_P(Nodes, NodeMemberSchedules, ::testing::Values(2, 3),
                         [](const auto& info) { return "Of" + std::to_string(info.param); });

}  // namespace
}  // namespace shardd
