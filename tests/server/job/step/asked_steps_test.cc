#include "server/job/step/asked_steps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/job/step/committed.h"
#include "server/storage/journal.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class AskedStepsTest : public ::testing::Test {
 protected:
  static v1::Step WithNorm(double max_grad_norm) {
    v1::Step step;
    step.set_max_grad_norm(max_grad_norm);
    return step;
  }
  Committed committed_{"job", 1, 2, nullptr};
  AskedSteps steps_{2, &committed_};
};

TEST_F(AskedStepsTest, FirstFindsWhoHasSteppedAndWhoHasNot) {
  EXPECT_EQ(steps_.First(/*stepped=*/true), -1);
  steps_.Ask(1, WithNorm(1), /*signal=*/7);
  EXPECT_EQ(steps_.First(true), 1);
  EXPECT_EQ(steps_.First(false), 0);
  EXPECT_EQ(steps_.signal(1), 7u);
  EXPECT_TRUE(steps_.any_stepped());
}

TEST_F(AskedStepsTest, DifferentHyperparametersNameTheRank) {
  steps_.Ask(0, WithNorm(1), 0);
  steps_.Ask(1, WithNorm(1), 0);
  EXPECT_TRUE(steps_.CheckEqual().ok());
  steps_.Ask(1, WithNorm(2), 0);
  EXPECT_THAT(steps_.CheckEqual().message(), HasSubstr("hyperparameters of rank 1 differ from rank 0's"));
}

TEST_F(AskedStepsTest, TheNextStepBeginsWithNothing) {
  v1::Step step = WithNorm(1);
  step.set_trainer_state("a");
  steps_.Ask(0, step, 3);
  steps_.AskInTrainer(1, "b");
  EXPECT_FALSE(steps_.stepped(1)) << "its optimizer is its own";
  EXPECT_THAT(steps_.TakeTrainerStates(), ElementsAre("a", "b"));
  EXPECT_FALSE(steps_.any_stepped());
  EXPECT_EQ(steps_.signal(0), 0u);
  EXPECT_EQ(steps_.step(0).max_grad_norm(), 0);
}

}  // namespace
}  // namespace shardd
