#include "client/fsdp/iteration.h"

#include <gtest/gtest.h>

namespace shardd::fsdp {
namespace {

class IterationTest : public ::testing::Test {
 protected:
  const int model_ = 0;
  const int part_ = 0;
  Iteration iteration_;
};

TEST_F(IterationTest, OnlyItsRootEndsAForward) {
  iteration_.BeginForward(&model_);
  EXPECT_FALSE(iteration_.EndForward(&part_));
  EXPECT_TRUE(iteration_.in_forward());
  EXPECT_TRUE(iteration_.EndForward(&model_));
  EXPECT_FALSE(iteration_.in_forward());
  EXPECT_FALSE(iteration_.EndForward(&model_));
}

TEST_F(IterationTest, TheFirstUnitsBackwardBeginsIt) {
  EXPECT_TRUE(iteration_.BeginBackward(/*whole=*/true));
  EXPECT_FALSE(iteration_.BeginBackward(/*whole=*/true));
  EXPECT_FALSE(iteration_.EndBackward());
  EXPECT_FALSE(iteration_.in_backward());
}

TEST_F(IterationTest, ABackwardOfInputsAloneIsPartial) {
  EXPECT_TRUE(iteration_.BeginBackward(/*whole=*/false));
  EXPECT_FALSE(iteration_.BeginBackward(/*whole=*/false));
  EXPECT_TRUE(iteration_.EndBackward());
  EXPECT_TRUE(iteration_.BeginBackward(/*whole=*/true));
  EXPECT_FALSE(iteration_.EndBackward());
}

TEST_F(IterationTest, AnOutputMakesABackwardWholeForGood) {
  iteration_.BeginBackward(/*whole=*/false);
  iteration_.BeginBackward(/*whole=*/true);
  iteration_.BeginBackward(/*whole=*/false);
  EXPECT_FALSE(iteration_.EndBackward());
}

TEST_F(IterationTest, ABackwardEndsTheForwardThatWasLeftOpen) {
  iteration_.BeginForward(&model_);
  iteration_.BeginBackward(/*whole=*/true);
  (void)iteration_.EndBackward();
  EXPECT_FALSE(iteration_.in_forward());
}

TEST_F(IterationTest, GraphsOfWhatWasAbandonedAreDead) {
  const uint64_t graph = iteration_.generation();
  iteration_.BeginForward(&model_);
  iteration_.BeginBackward(/*whole=*/false);
  iteration_.Abandon();
  EXPECT_NE(iteration_.generation(), graph);
  EXPECT_FALSE(iteration_.in_forward());
  EXPECT_FALSE(iteration_.in_backward());
  iteration_.BeginBackward(/*whole=*/true);
  EXPECT_FALSE(iteration_.EndBackward());
}

}  // namespace
}  // namespace shardd::fsdp
