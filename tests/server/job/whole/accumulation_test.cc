// Gradients of several backwards in one step, where ranks contribute to some of them only.

#include "tests/server/job/gradients_fixture.h"

namespace shardd {
namespace {

class AccumulationTest : public GradientsTest {
 protected:
  static SpecBuilder MayMiss() {
    SpecBuilder builder = TwoGroups();
    builder.config().set_allow_missing_contribution(true);
    return builder;
  }
  AccumulationTest() : GradientsTest(MayMiss()) {}
};

TEST_F(AccumulationTest, ARankThatAccumulatesByItselfCountsTheSame) {
  Backward(0, 2);
  Done(1);  // rank 1 keeps the first one
  Backward(0, 6);
  Backward(1, 4 + 8);
  StepAll(1);
  EXPECT_EQ(First(kA), -10);
  EXPECT_EQ(First(kB), -10);
}

TEST_F(AccumulationTest, BackwardToWhichNobodyContributesIsNothing) {
  for (int rank = 0; rank < kRanks; ++rank) {
    Done(rank);
    Backward(rank, 3);
    Done(rank);
  }
  StepAll(1);
  EXPECT_EQ(First(kA), -3);
}

TEST_F(AccumulationTest, RankWithoutAnyGradientInTheStepCountsAsZero) {
  Backward(0, 2);
  Step(1);  // rank 1 has closed nothing
  Backward(0, 2);
  Step(0);
  ASSERT_TRUE(Until([&] { return job_->view().committed_step() == 1; }));
  EXPECT_EQ(First(kA), -2);
  EXPECT_EQ(Last(kA), -2);
}

TEST_F(AccumulationTest, AGroupThatOneRankSkipsIsReducedFromOthers) {
  for (int micro = 0; micro < 3; ++micro) {
    Backward(0, 2);
    Submit(1, kA, 4);
    Done(1);
  }
  StepAll(1);
  EXPECT_EQ(First(kA), -9);
  EXPECT_EQ(First(kB), -3);
}

TEST_F(AccumulationTest, TheFirstBackwardReplacesGradientsAndOthersAdd) {
  for (int64_t step = 1; step <= 2; ++step) {
    for (int micro = 0; micro < 3; ++micro) {
      Backward(0, 2, /*fresh=*/micro == 0);
      Backward(1, 4, /*fresh=*/micro == 0);
    }
    StepAll(step);
    EXPECT_EQ(First(kA), static_cast<float>(-9 * step));
  }
}

}  // namespace
}  // namespace shardd
