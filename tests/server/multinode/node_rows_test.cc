// Nodes of several rows in random schedules in which daemons die and leave nothing: each is sent what it held by a node
// with its place in another row, no step that ranks have seen is lost, and all train again when the trouble ends.

#include <gtest/gtest.h>

#include "server/multinode/node_member.h"
#include "tests/server/multinode/node_world.h"
#include "tests/server/multinode/seeds.h"
#include "tests/testing/long_run.h"

namespace shardd {
namespace {

using testing::NodeWorld;

struct Counts {
  int restored = 0;
  int by_others = 0;
  int had_none = 0;
  int asked_again = 0;
  int taken_up = 0;
  int recoveries = 0;
  int lost_twice = 0;
  int came_older = 0;
  int node0_came_older = 0;
  int promised_came = 0;
  int promised_loads_came = 0;
  int made_came = 0;
  int pieces_behind_end = 0;
  int decisions_lost = 0;
};

Counts RunSchedules(int nodes, int row, bool extends, int seeds, bool twice = false) {
  Counts counts;
  seeds = testing::LongRun("SHARDD_SCHEDULES", seeds);
  for (uint64_t seed = 1; seed <= static_cast<uint64_t>(seeds); seed += testing::kSeedStride) {
    NodeWorld world(nodes, seed, /*allow_missing=*/seed % 2 == 0,
                    {.daemons_die = true,
                     .custodians = true,
                     .cut = true,
                     .row = row,
                     .extends = extends && seed % 4 == 0,
                     .rows_lose = true,
                     .twice = twice});
    const std::string failure = world.Run(/*events=*/static_cast<int>(1000 + 3 * (seed % 1700)));
    EXPECT_EQ(failure, "") << "seed " << seed;
    if (!failure.empty()) return counts;
    counts.restored += world.restored();
    counts.by_others += world.restored_by_others();
    counts.had_none += world.had_none();
    counts.asked_again += world.asked_again();
    counts.taken_up += world.taken_up();
    counts.recoveries += world.recoveries();
    counts.lost_twice += world.lost_twice();
    counts.came_older += world.came_older();
    counts.node0_came_older += world.node0_came_older();
    counts.promised_came += world.promised_came();
    counts.promised_loads_came += world.promised_loads_came();
    counts.made_came += world.made_came();
    counts.pieces_behind_end += world.pieces_behind_end();
    counts.decisions_lost += world.decisions_lost();
  }
  return counts;
}

TEST(NodeRows, LostStateComesFromTheOtherRow) {
  const Counts counts = RunSchedules(4, 2, /*extends=*/true, 800);
  EXPECT_GT(counts.restored, testing::InAll(400));
  EXPECT_GT(counts.by_others, testing::InAll(200));
  EXPECT_GT(counts.recoveries, testing::InAll(50)) << "of node 0";
  EXPECT_GT(counts.taken_up, testing::InAll(200));
}

TEST(NodeRows, LostStateComesFromTheThirdRowWhereTwoLoseIt) {
  const Counts counts = RunSchedules(6, 2, /*extends=*/false, 600);
  EXPECT_GT(counts.restored, testing::InAll(300));
  EXPECT_GT(counts.by_others, testing::InAll(150));
  EXPECT_GT(counts.had_none, testing::InAll(5));
  EXPECT_GT(counts.asked_again, testing::InAll(5));
}

// Who has sent a state is lost while it is made of what has come, or node 0 is, or its link; and some come back with
// what a machine has kept that was cut off.
TEST(NodeRows, LostStateComesThoughASecondIsLostMeanwhile) {
  const Counts counts = RunSchedules(4, 2, /*extends=*/false, 1000, /*twice=*/true);
  EXPECT_GT(counts.restored, testing::InAll(1000));
  EXPECT_GT(counts.lost_twice, testing::InAll(200));
  EXPECT_GT(counts.came_older, testing::InAll(100));
  EXPECT_GT(counts.promised_came, testing::InAll(3));
  EXPECT_GT(counts.promised_loads_came, testing::InAll(3));
  EXPECT_GT(counts.made_came, testing::InAll(3));
  EXPECT_GT(counts.pieces_behind_end, testing::InAll(20));
  EXPECT_GT(counts.decisions_lost, testing::InAll(5));
  EXPECT_GT(counts.node0_came_older, testing::InAll(20));
}

TEST(NodeRows, LostStateComesFromTheThirdRowThoughASecondIsLost) {
  const Counts counts = RunSchedules(6, 2, /*extends=*/false, 600, /*twice=*/true);
  EXPECT_GT(counts.restored, testing::InAll(600));
  EXPECT_GT(counts.lost_twice, testing::InAll(100));
  EXPECT_GT(counts.came_older, testing::InAll(50));
}

}  // namespace
}  // namespace shardd
