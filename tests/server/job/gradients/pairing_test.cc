#include "server/job/gradients/pairing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "common/shm/ring.h"
#include "server/job/step/committed.h"
#include "server/multinode/backwards.h"
#include "server/storage/journal.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Optional;

constexpr int kGroup = 1;  // the first block; the root is 0
constexpr int kOther = 2;

class PairingTest : public ::testing::Test {
 protected:
  PairingTest() {
    SpecBuilder builder(/*world_size=*/2);
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
    builder.Param(0, "root", {8});
    for (const char* block : {"a", "b"}) {
      builder.Param(builder.AddSharded(0, block), "w", {8});
    }
    plan_ = std::make_shared<const ShardPlan>(builder.Plan());
    pairing_ = std::make_unique<Pairing>(plan_, &committed_);
  }

  absl::StatusOr<PairKey> Give(int rank, int group, bool fresh = false, bool present = true, uint32_t flags = 0) {
    RankCommand command;
    command.flags = flags;
    command.group = group;
    command.present = {present};
    command.fresh = {fresh};
    absl::StatusOr<Contribution> contribution = pairing_->Check(rank, std::move(command), "SubmitGradients");
    if (!contribution.ok()) {
      return contribution.status();
    }
    return pairing_->Give(rank, group, *std::move(contribution));
  }
  // As whoever adds does: takes what is complete, and frees the slots.
  absl::StatusOr<Pairing::Sum> Add(PairKey key, const std::vector<int>& ranks) {
    pairing_->Settle(key);
    absl::StatusOr<Pairing::Sum> sum = pairing_->Take(key, ranks, nullptr);
    for (int rank : ranks) {
      pairing_->FreeSlot(rank, plan_->groups[static_cast<size_t>(key.second)].gradient_slot);
    }
    return sum;
  }

  std::vector<int> Ask(int rank) { return pairing_->given_by_others().Ask(rank, 0, pairing_->closed(rank)); }

  std::shared_ptr<const ShardPlan> plan_;
  Committed committed_{"job", 3, 2, nullptr};
  std::unique_ptr<Pairing> pairing_;
};

TEST_F(PairingTest, APairIsCompleteWhenAllHaveGiven) {
  const PairKey key = *Give(0, kGroup);
  EXPECT_EQ(key, PairKey(0, kGroup));
  EXPECT_EQ(pairing_->Complete(key), std::nullopt);
  ASSERT_TRUE(Give(1, kGroup).ok());
  EXPECT_THAT(pairing_->Complete(key), Optional(ElementsAre(0, 1)));
  const absl::StatusOr<Pairing::Sum> sum = Add(key, {0, 1});
  ASSERT_TRUE(sum.ok()) << sum.status();
  EXPECT_THAT(sum->modes, ElementsAre(GradientMode::kOverwrite)) << "nothing was there";
  EXPECT_EQ(pairing_->Complete(key), std::nullopt) << "each counts once";
}

TEST_F(PairingTest, SleepersForASlotBeingReducedAwaitNoTurn) {
  const PairKey key = *Give(0, kGroup);
  pairing_->Sleep(0, plan_->groups[kGroup].gradient_slot);
  EXPECT_TRUE(pairing_->SleepsForTurn(0));
  ASSERT_TRUE(Give(1, kGroup).ok());
  pairing_->Settle(key);
  ASSERT_TRUE(pairing_->Take(key, {0, 1}, nullptr).ok());  // its slots are freed when the sum is there
  pairing_->Close(0, 0);
  pairing_->Close(1, 0);
  pairing_->ForgetIfClosed(key);
  EXPECT_FALSE(pairing_->SleepsForTurn(0));
}

TEST_F(PairingTest, ASecondBackwardAddsToTheFirst) {
  for (const GradientMode mode : {GradientMode::kOverwrite, GradientMode::kAccumulate}) {
    const PairKey key = *Give(0, kGroup);
    ASSERT_TRUE(Give(1, kGroup).ok());
    const absl::StatusOr<Pairing::Sum> sum = Add(key, {0, 1});
    ASSERT_TRUE(sum.ok()) << sum.status();
    EXPECT_THAT(sum->modes, ElementsAre(mode));
    pairing_->Close(0, 0);
    pairing_->Close(1, 0);
  }
  EXPECT_EQ(pairing_->closed_by_all(), 2);
}

TEST_F(PairingTest, AFreshGradientKeepsWhatOthersGaveInThisBackward) {
  for (int backward = 0; backward < 2; ++backward) {  // the first leaves something to replace
    const PairKey key = *Give(0, kGroup, /*fresh=*/true);
    ASSERT_TRUE(Give(1, kGroup, /*fresh=*/false, /*present=*/false).ok());
    const absl::StatusOr<Pairing::Sum> first = Add(key, {0, 1});
    ASSERT_TRUE(first.ok()) << first.status();
    EXPECT_THAT(first->modes, ElementsAre(GradientMode::kOverwrite));
    pairing_->NextOccurrence(key);
    ASSERT_TRUE(Give(0, kGroup, /*fresh=*/false).ok());  // more of it, and the other's first
    ASSERT_TRUE(Give(1, kGroup, /*fresh=*/true).ok());
    const absl::StatusOr<Pairing::Sum> second = Add(key, {0, 1});
    ASSERT_TRUE(second.ok()) << second.status();
    EXPECT_THAT(second->modes, ElementsAre(GradientMode::kAccumulate));
    pairing_->NextOccurrence(key);
    pairing_->Close(0, 0);
    pairing_->Close(1, 0);
    pairing_->ForgetIfClosed(key);
  }
}

TEST_F(PairingTest, AFullSlotIsRefused) {
  ASSERT_TRUE(Give(0, kGroup).ok());
  const absl::Status status = Give(0, kGroup).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("still holds group"));
}

TEST_F(PairingTest, WhoClosesWithoutAGroupOfOthersIsNamed) {
  const PairKey key = *Give(0, kGroup);
  pairing_->Close(1, 0);
  const absl::Status status = pairing_->CheckMissing(key);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("rank 1 closed backward 0 without SubmitGradients"));
  EXPECT_THAT(status.message(), HasSubstr("(rank=1, step=1)"));
}

TEST_F(PairingTest, ReplacingOnOneRankAndAddingOnAnotherIsRefused) {
  const PairKey key = *Give(0, kGroup, /*fresh=*/true);
  ASSERT_TRUE(Give(1, kGroup, /*fresh=*/false).ok());
  EXPECT_THAT(Add(key, {0, 1}).status().message(), HasSubstr("replaces on rank 0 and adds on rank 1"));
}

TEST_F(PairingTest, WhatIsTakenBackIsGivenAgainOnce) {
  ASSERT_TRUE(Give(0, kGroup).ok());
  const Pairing::Abandoned abandoned = pairing_->Abandon(0);
  EXPECT_EQ(abandoned.taken_back, 1);
  EXPECT_EQ(abandoned.stays, 0);
  EXPECT_THAT(abandoned.freed_slots, ElementsAre(plan_->groups[kGroup].gradient_slot));
  pairing_->FreeSlot(0, abandoned.freed_slots.front());
  ASSERT_TRUE(Give(0, kGroup).ok());
  const PairKey key = *Give(1, kGroup);
  EXPECT_THAT(pairing_->Complete(key), Optional(ElementsAre(0, 1)));
}

TEST_F(PairingTest, WhatWasAddedStandsForTheSecondTry) {
  const PairKey key = *Give(0, kGroup);
  ASSERT_TRUE(Give(1, kGroup).ok());
  ASSERT_TRUE(Add(key, {0, 1}).ok());
  EXPECT_EQ(pairing_->Abandon(0).stays, 1);
  pairing_->Close(1, 0);
  ASSERT_TRUE(Give(0, kGroup).ok());
  ASSERT_THAT(pairing_->Complete(key), Optional(ElementsAre(0)));
  const absl::StatusOr<Pairing::Sum> sum = Add(key, {0});
  ASSERT_TRUE(sum.ok()) << sum.status();
  EXPECT_THAT(sum->given.front().present, ElementsAre(false)) << "the first try is in the sum";
}

TEST_F(PairingTest, RanksThatSleepForEachOtherAreReducedEarly) {
  ASSERT_TRUE(Give(0, kGroup).ok());
  ASSERT_TRUE(Give(1, kOther).ok());
  pairing_->Sleep(0, plan_->groups[kGroup].gradient_slot);
  pairing_->Sleep(1, plan_->groups[kOther].gradient_slot);
  EXPECT_TRUE(pairing_->SleepsForTurn(0));
  EXPECT_EQ(pairing_->WaitingFor(0).rank, 1);
  EXPECT_THAT(pairing_->WaitingFor(0).call, HasSubstr("SubmitGradients \"a\" of backward 0"));
  const absl::StatusOr<std::optional<Pairing::Early>> early = pairing_->BeforeTurn(0);
  ASSERT_TRUE(early.ok() && early->has_value());
  EXPECT_THAT((*early)->ranks, ElementsAre(0));
  ASSERT_TRUE(Add((*early)->key, (*early)->ranks).ok());
  pairing_->AddedBeforeTurn(**early);
  EXPECT_FALSE(pairing_->sleeps(0));
  const PairKey key = *Give(1, kGroup);
  EXPECT_THAT(pairing_->Complete(key), Optional(ElementsAre(1))) << "rank 0's part is in the sum";
  pairing_->NextOccurrence(key);
}

TEST_F(PairingTest, AFreshGradientIsNotAddedBeforeItsTurn) {
  pairing_->Close(0, 0);
  ASSERT_TRUE(Give(0, kGroup, /*fresh=*/true).ok());
  pairing_->Sleep(0, plan_->groups[kGroup].gradient_slot);
  EXPECT_THAT(pairing_->BeforeTurn(0).status().message(), HasSubstr("a gradient that replaces cannot be added"));
}

TEST_F(PairingTest, ASubmissionIsSaidToNodesOnce) {
  const PairKey key = *Give(0, kGroup);
  ASSERT_TRUE(Give(1, kGroup).ok());
  const std::optional<Pairing::Said> said = pairing_->Say(key, {0, 1});
  ASSERT_TRUE(said.has_value());
  EXPECT_EQ(said->occurrence, 0);
  EXPECT_EQ(pairing_->Say(key, {0, 1}), std::nullopt);
  EXPECT_TRUE(pairing_->AwaitsNodes());
  EXPECT_THAT(pairing_->ToldToAdd(key, 1), IsEmpty()) << "another occurrence is not this node's";
  EXPECT_THAT(pairing_->ToldToAdd(key, 0), ElementsAre(0, 1));
  ASSERT_TRUE(Add(key, {0, 1}).ok());
  pairing_->AddedOverNodes(key, 0);
  EXPECT_FALSE(pairing_->AwaitsNodes());
}

TEST_F(PairingTest, TheEndOfAStepKeepsWhatLiesInSlots) {
  ASSERT_TRUE(Give(0, kGroup).ok());
  pairing_->CloseAll(0);
  EXPECT_EQ(pairing_->closed(0), kAllBackwards);
  pairing_->EndStep();
  EXPECT_EQ(pairing_->closed(0), 0);
  EXPECT_TRUE(pairing_->empty());
  EXPECT_TRUE(pairing_->HoldsSlot(0, plan_->groups[kGroup].gradient_slot)) << "until it is released";
  pairing_->EndEpoch();
  EXPECT_FALSE(pairing_->HoldsSlot(0, plan_->groups[kGroup].gradient_slot));
}

TEST_F(PairingTest, WhoGivesNothingLacksWhatOthersGive) {
  const PairKey key = *Give(0, kGroup);
  ASSERT_TRUE(Give(1, kGroup, /*fresh=*/false, /*present=*/false).ok());
  EXPECT_THAT(Add(key, {0, 1})->lacking, ElementsAre(1));
  EXPECT_THAT(Ask(1), ElementsAre(plan_->groups[kGroup].params.front()));
  EXPECT_THAT(Ask(0), IsEmpty());
  pairing_->EndStep();
  EXPECT_THAT(Ask(1), IsEmpty());
}

TEST_F(PairingTest, ASecondTryThatLeavesOutTheFirstOnesGradientLacksIt) {
  const PairKey key = *Give(0, kGroup);
  ASSERT_TRUE(Give(1, kGroup).ok());
  EXPECT_THAT(Add(key, {0, 1})->lacking, IsEmpty());
  EXPECT_THAT(Ask(0), IsEmpty());
  EXPECT_EQ(pairing_->Abandon(0).stays, 1);
  EXPECT_THAT(Ask(0), ElementsAre(plan_->groups[kGroup].params.front()));
}

TEST_F(PairingTest, WhoHasNotAskedAboutOthersGradientsAddsToThem) {
  enum class Asks { kNever, kNotYet, kHasAsked };
  for (const Asks asks : {Asks::kNever, Asks::kNotYet, Asks::kHasAsked}) {
    const uint32_t flags = asks == Asks::kNever ? 0 : kAsksForOthers;
    const PairKey first = *Give(0, kGroup, /*fresh=*/true, /*present=*/true, flags);
    ASSERT_TRUE(Give(1, kGroup, /*fresh=*/false, /*present=*/false, flags).ok());
    ASSERT_TRUE(Add(first, {0, 1}).ok());
    pairing_->Close(0, 0);
    pairing_->Close(1, 0);
    if (asks == Asks::kHasAsked) Ask(1);
    const PairKey second = *Give(1, kGroup, /*fresh=*/true, /*present=*/true, flags);
    ASSERT_TRUE(Give(0, kGroup, /*fresh=*/false, /*present=*/false, flags).ok());
    const absl::StatusOr<Pairing::Sum> sum = Add(second, {0, 1});
    ASSERT_TRUE(sum.ok()) << sum.status();
    const bool adds = asks == Asks::kNotYet;  // else it knows, or its client is older, and does as it says
    EXPECT_THAT(sum->modes, ElementsAre(adds ? GradientMode::kAccumulate : GradientMode::kOverwrite));
    pairing_->EndStep();
    pairing_->presence().Clear();
  }
}

TEST_F(PairingTest, WhoHoldsNothingReplacesWhatIsFromBeforeTheStep) {
  // One row: rank 0 holds it, and rank 1 nothing.
  SpecBuilder builder(/*world_size=*/2);
  builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  builder.config().set_layout(v1::LAYOUT_DIM0);
  builder.Param(0, "root", {8});
  builder.Param(builder.AddSharded(0, "a"), "w", {1});
  plan_ = std::make_shared<const ShardPlan>(builder.Plan());
  pairing_ = std::make_unique<Pairing>(plan_, &committed_);
  ASSERT_THAT(pairing_->presence().Holders(plan_->groups[kGroup].params.front()), ElementsAre(true, false));
  const auto give = [this](bool holder_gives) {
    const PairKey key = *Give(1, kGroup, /*fresh=*/false, /*present=*/true, kAsksForOthers);
    EXPECT_TRUE(Give(0, kGroup, /*fresh=*/holder_gives, /*present=*/holder_gives, kAsksForOthers).ok());
    const absl::StatusOr<Pairing::Sum> sum = Add(key, {0, 1});
    EXPECT_TRUE(sum.ok()) << sum.status();
    pairing_->Close(0, 0);
    pairing_->Close(1, 0);
    return sum->modes.front();
  };
  EXPECT_EQ(give(/*holder_gives=*/true), GradientMode::kOverwrite);
  pairing_->EndStep();  // of the trainers': the gradient is still there
  EXPECT_EQ(give(/*holder_gives=*/false), GradientMode::kOverwrite);
  EXPECT_EQ(give(/*holder_gives=*/false), GradientMode::kAccumulate) << "of the same step";
}

TEST_F(PairingTest, PresenceIsNotSaidInAnOpenBackward) {
  ASSERT_TRUE(Give(0, kGroup).ok());
  const int param = plan_->groups[kGroup].params.front();
  EXPECT_THAT(pairing_->SetPresence(0, param, false, false).message(), HasSubstr("call BackwardDone first"));
  EXPECT_EQ(pairing_->SetPresence(0, 99, false, false).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(pairing_->SetPresence(1, param, false, true).message(), HasSubstr("being committed"));
}

}  // namespace
}  // namespace shardd
