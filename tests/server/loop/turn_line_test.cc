#include "server/loop/turn_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace shardd {
namespace {

using ::testing::ElementsAre;

class TurnLineTest : public ::testing::Test {
 protected:
  TurnLineTest() {
    for (int one = 0; one < 3; ++one) line_.Add(one);
  }
  // What a turn until then takes.
  std::vector<int> Taken(absl::Time until) {
    std::vector<int> taken;
    line_.Take(until, [&](int one) { taken.push_back(one); });
    return taken;
  }

  TurnLine<int> line_;
};

// One user's sixty sessions have as many batches as sessions: without this each of them delays others in every round.
TEST_F(TurnLineTest, WhoComesBehindTheEndOfATurnWaits) {
  EXPECT_THAT(Taken(absl::InfinitePast()), ElementsAre(0)) << "one at least, so that it goes on";
  EXPECT_THAT(Taken(absl::InfinitePast()), ElementsAre(1));
  EXPECT_THAT(Taken(absl::InfiniteFuture()), ElementsAre(2));
  EXPECT_TRUE(line_.empty());
  EXPECT_FALSE(line_.Take(absl::InfiniteFuture(), [](int) {}));
}

TEST_F(TurnLineTest, WhatIsAddedMeanwhileHasAnotherTurn) {
  std::vector<int> taken;
  line_.Take(absl::InfiniteFuture(), [&](int one) {
    taken.push_back(one);
    if (one == 0) line_.Add(3);
  });
  EXPECT_THAT(taken, ElementsAre(0, 1, 2));
  EXPECT_THAT(Taken(absl::InfiniteFuture()), ElementsAre(3));
}

}  // namespace
}  // namespace shardd
