#include "server/job/gradients/gradient_presence.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int kWhole = 0;  // cut over both ranks

class GradientPresenceTest : public ::testing::Test {
 protected:
  GradientPresenceTest() {
    SpecBuilder builder(/*world_size=*/2);
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
    builder.Param(0, "w", {64});
    presence_ = std::make_unique<GradientPresence>(std::make_shared<const ShardPlan>(builder.Plan()));
  }
  std::unique_ptr<GradientPresence> presence_;
};

TEST_F(GradientPresenceTest, WhatAnyRankHasIsPresent) {
  presence_->Say(0, kWhole, {0, true, false});
  const GradientPresence::Uneven uneven = presence_->SettleAll();
  EXPECT_TRUE(presence_->has(kWhole));
  ASSERT_TRUE(uneven.contains(kWhole)) << "the other rank's part is zero";
  EXPECT_THAT(uneven.at(kWhole), ElementsAre(true, false));
}

TEST_F(GradientPresenceTest, WhatNoRankHasIsAbsent) {
  presence_->Set(kWhole, true);
  presence_->Say(0, kWhole, {0, false, false});
  presence_->Say(1, kWhole, {0, false, false});
  EXPECT_THAT(presence_->SettleAll(), IsEmpty());
  EXPECT_FALSE(presence_->has(kWhole));
}

TEST_F(GradientPresenceTest, AWordWaitsForItsBackward) {
  presence_->Say(0, kWhole, {2, true, false});
  EXPECT_FALSE(presence_->IsSaid(0, kWhole, 1));
  EXPECT_THAT(presence_->Settle({kWhole}, 1), IsEmpty());
  EXPECT_FALSE(presence_->has(kWhole));
  EXPECT_TRUE(presence_->IsSaid(0, kWhole, 2));
  presence_->Settle({kWhole}, 2);
  EXPECT_TRUE(presence_->has(kWhole));
  EXPECT_FALSE(presence_->IsSaid(0, kWhole, 2)) << "a word counts once";
}

TEST_F(GradientPresenceTest, AFirstTryIsDroppedOnlyByAll) {
  presence_->Set(kWhole, true);
  presence_->Say(0, kWhole, {0, false, true});
  EXPECT_THAT(presence_->SettleAll(), IsEmpty()) << "the other's gradients are in the same sum";
  EXPECT_TRUE(presence_->has(kWhole));
  presence_->Say(0, kWhole, {0, false, true});
  presence_->Say(1, kWhole, {0, false, true});
  presence_->SettleAll();
  EXPECT_FALSE(presence_->has(kWhole));
}

TEST_F(GradientPresenceTest, WithdrawnPresenceAndThatOfEndedEpochsHasNoEffect) {
  presence_->Say(0, kWhole, {0, true, false});
  presence_->Unsay(0, kWhole);
  presence_->SettleAll();
  EXPECT_FALSE(presence_->has(kWhole));
  presence_->Say(1, kWhole, {0, true, false});
  presence_->Reset();
  presence_->SettleAll();
  EXPECT_FALSE(presence_->has(kWhole));
}

}  // namespace
}  // namespace shardd
