// Gradients that trainers drop or write between backward and step.

#include <unistd.h>

#include "common/plan/session_layout.h"
#include "common/shm/session_view.h"
#include "tests/server/job/gradients_fixture.h"

namespace shardd {
namespace {

class PresenceTest : public GradientsTest {
 protected:
  using GradientsTest::GradientsTest;
  // One backward of all ranks whose gradients are the mean of 2 and 4.
  void BackwardOfAll(bool fresh = false) {
    Backward(0, 2, fresh);
    Backward(1, 4, fresh);
    AwaitAdded(0, kA);
    AwaitAdded(1, kA);
    AwaitAdded(0, kB);
  }
  void Give(int rank, int group, float value) {
    float* const part = Gradient(group) + rank * kNumel / 2;
    std::fill(part, part + kNumel / 2, value);
    Say(rank, group, true);
  }
};

TEST_F(PresenceTest, GradientsDroppedByAllMeanNoUpdateDecayOrNorm) {
  std::fill_n(Shard(kA), kNumel, 1.0f);
  std::fill_n(Shard(kB), kNumel, 1.0f);
  BackwardOfAll();
  Say(0, kB, false);
  Say(1, kB, false);
  StepAll(1, /*weight_decay=*/0.5, /*max_grad_norm=*/3);
  EXPECT_EQ(First(kB), 1);
  EXPECT_EQ(Last(kB), 1);
  EXPECT_NEAR(First(kA), 1 - 0.5f - 3.0f / std::sqrt(64), 1e-5) << "clipped by its own norm, 24";
}

TEST_F(PresenceTest, DroppedByOneRankCountsAsZeroInItsPart) {
  std::fill_n(Shard(kB), kNumel, 1.0f);
  BackwardOfAll();
  Say(0, kB, false);
  StepAll(1, /*weight_decay=*/0.5);
  EXPECT_EQ(First(kB), 0.5f) << "decayed only";
  EXPECT_EQ(Last(kB), 0.5f - 3);
}

TEST_F(PresenceTest, GivenWithoutAnyBackwardIsUsed) {
  Give(0, kA, 5);
  Give(1, kA, 7);
  StepAll(1);
  EXPECT_EQ(First(kA), -5) << "a shard is written by its owner and divided by nothing";
  EXPECT_EQ(Last(kA), -7);
  EXPECT_EQ(First(kB), 0);
}

TEST_F(PresenceTest, GivenByOneRankIsZeroInTheOthersParts) {
  std::fill_n(Gradient(kA), kNumel, 99.0f);  // of no meaning
  Give(1, kA, 7);
  StepAll(1);
  EXPECT_EQ(First(kA), 0);
  EXPECT_EQ(Last(kA), -7);
}

TEST_F(PresenceTest, GivenBeforeABackwardIsAddedTo) {
  Give(0, kA, 5);
  Give(1, kA, 7);
  BackwardOfAll();
  StepAll(1);
  EXPECT_EQ(First(kA), -8);
  EXPECT_EQ(Last(kA), -10);
  EXPECT_EQ(First(kB), -3);
}

TEST_F(PresenceTest, AGradientThatOneRankGaveIsAddedToThere) {
  std::fill_n(Gradient(kA), kNumel, 99.0f);
  Give(0, kA, 5);
  BackwardOfAll();
  StepAll(1);
  EXPECT_EQ(First(kA), -8);
  EXPECT_EQ(Last(kA), -3);
}

TEST_F(PresenceTest, FreshGradientsReplaceWhatWasGiven) {
  Give(0, kA, 5);
  Give(1, kA, 5);
  BackwardOfAll(/*fresh=*/true);
  StepAll(1);
  EXPECT_EQ(First(kA), -3);
}

TEST_F(PresenceTest, DroppedBeforeABackwardIsReplacedByIt) {
  BackwardOfAll();
  Say(0, kB, false);
  Say(1, kB, false);
  BackwardOfAll();
  StepAll(1);
  EXPECT_EQ(First(kB), -3);
  EXPECT_EQ(First(kA), -6);
}

TEST_F(PresenceTest, LastWordCounts) {
  BackwardOfAll();
  for (bool present : {false, true, false}) {
    Say(0, kA, present);
    Say(1, kA, present);
    Say(0, kB, !present);
    Say(1, kB, !present);
  }
  StepAll(1);
  EXPECT_EQ(First(kA), 0);
  EXPECT_EQ(First(kB), -3);
}

TEST_F(PresenceTest, RanksAheadSpeakOfTheirPlaceInTheStep) {
  Backward(0, 2);
  Say(0, kB, false);  // after a backward that rank 1 has not begun
  Backward(1, 4);
  AwaitAdded(1, kB);
  StepAll(1);
  EXPECT_EQ(First(kB), 0) << "dropped after the reduction, not before it";
  EXPECT_EQ(Last(kB), -3);
}

TEST_F(PresenceTest, PresenceOfOneStepSaysNothingOfTheNext) {
  BackwardOfAll();
  Say(0, kB, false);
  Say(1, kB, false);
  StepAll(1);
  BackwardOfAll();
  StepAll(2);
  EXPECT_EQ(First(kB), -3);
}

TEST_F(PresenceTest, InAnOpenBackwardItIsRefused) {
  Submit(0, kB, 1);
  Say(0, kB, false);
  ASSERT_FALSE(Alive());
  EXPECT_NE(Error().find("SetGradientPresence \"b.w\""), std::string::npos) << Error();
  EXPECT_NE(Error().find("call BackwardDone first"), std::string::npos) << Error();
}

TEST_F(PresenceTest, AfterStepItIsRefused) {
  Step(0);
  Say(0, kB, false);
  ASSERT_FALSE(Alive());
  EXPECT_NE(Error().find("the step is being committed"), std::string::npos) << Error();
}

TEST_F(PresenceTest, ParameterOutOfRangeIsRefused) {
  v1::Command command;
  command.mutable_set_gradient_presence()->set_param(3);
  Send(0, command);
  ASSERT_FALSE(Alive());
  EXPECT_NE(Error().find("no such parameter (got 3, want 0 to 2)"), std::string::npos) << Error();
}

TEST_F(PresenceTest, AnAbandonedBackwardDroppedByAllLeavesNoTrace) {
  for (int rank = 0; rank < kRanks; ++rank) {
    Submit(rank, kB, 100);
  }
  AwaitAdded(0, kB);
  for (int rank = 0; rank < kRanks; ++rank) {
    Abandon(rank);
    Say(rank, kB, false);
  }
  BackwardOfAll();
  StepAll(1);
  EXPECT_EQ(First(kB), -3);
}

TEST_F(PresenceTest, ARankThatRepeatsItsBackwardDropsNobodysGradient) {
  Backward(1, 4, /*fresh=*/true);
  Submit(0, kB, 10, /*fresh=*/true);
  AwaitAdded(0, kB);
  Abandon(0);
  Say(0, kB, false);  // zero_grad, before it does again what is in the sum with rank 1's already
  Backward(0, 2, /*fresh=*/true);
  StepAll(1);
  EXPECT_EQ(First(kB), -7);
  EXPECT_EQ(Last(kB), -7);
  EXPECT_EQ(First(kA), -3);
}

TEST_F(PresenceTest, NobodyAttachesWhileZerosOfAnEndedEpochAreWritten) {
  BackwardOfAll();
  Say(0, kB, false);
  devices_[0]->Hold();
  for (int rank = 0; rank < kRanks; ++rank) {
    Step(rank);
  }
  ASSERT_TRUE(testing::PollUntil([&] { return devices_[0]->Waiting(); }, kPatience)) << "the zeros";
  OnLoop([&] { job_->Abort(absl::AbortedError("test"), {}); });
  const auto attach = [&] {
    absl::Status status;
    auto session = Session::Create(plan_, ++sessions_made_, 0, epoch());
    if (session.ok()) (*session)->peer.pid = getpid();
    OnLoop([&] { status = job_->AddSession(*std::move(session)); });
    return status;
  };
  const absl::Status early = attach();
  EXPECT_TRUE(absl::IsAborted(early)) << early;
  devices_[0]->Release();
  EXPECT_TRUE(testing::PollUntil([&] { return attach().ok(); }, kPatience));
}

TEST_F(PresenceTest, ReductionThatAddsNothingEndsWithItsZeros) {
  BackwardOfAll();
  AwaitAdded(1, kB);
  Say(1, kB, false);
  devices_[1]->Hold(StreamId::kPostBackward);
  const uint64_t before = Word(0, plan_->groups[kB].gradient_slot);
  const std::string nothing(1, '\0');
  for (int group : {kB, kA}) {
    for (int rank = 0; rank < kRanks; ++rank) {
      Submit(rank, group, 0, /*fresh=*/false, nothing);
    }
  }
  AwaitAdded(0, kA);  // behind it on rank 0's device
  EXPECT_TRUE(devices_[1]->Waiting());
  EXPECT_EQ(Word(0, plan_->groups[kB].gradient_slot), before) << "rank 1's part is not zero yet";
  devices_[1]->Release();
  for (int rank = 0; rank < kRanks; ++rank) {
    Done(rank);
  }
  StepAll(1);
  EXPECT_EQ(First(kB), -3);
  EXPECT_EQ(Last(kB), 0);
}

// Groups too large for slots of their own: a and c share one, and ranks that begin with different ones stop each other.
class FoldedPresenceTest : public PresenceTest {
 protected:
  static constexpr int kC = 3;
  static constexpr int kLarge = 1 << 17;
  static SpecBuilder LargeGroups() {
    SpecBuilder builder(kRanks);
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
    builder.Param(0, "root", {kNumel});
    for (const char* name : {"a", "b", "c"}) {
      builder.Param(builder.AddSharded(0, name), "w", {kLarge});
    }
    return builder;
  }
  FoldedPresenceTest() : PresenceTest(LargeGroups()) {}
  // By the ring, as its first record.
  void AwaitSlot(int rank, int group) {
    OnLoop([&] {
      const SessionLayout layout = MakeSessionLayout(*plan_);
      const SessionMemoryView view(job_->sessions()[rank].get()->memory()->memory->data(), layout.ring_offset_bytes,
                                   layout.masks_offset_bytes);
      CommandRecord record = {};
      record.opcode = Opcode::kWaitGradientSlot;
      record.group = group;
      view.record(0) = record;
      view.page().submitted.store(TimelineValue(job_->committed().epoch(), 1));
      job_->PollRings();
    });
  }
};

TEST_F(FoldedPresenceTest, PresenceToldBeforeAnEarlyReductionIsSettledThere) {
  ASSERT_EQ(plan_->groups[kA].gradient_slot, plan_->groups[kC].gradient_slot);
  std::fill_n(Gradient(kA), kLarge, 5.0f);
  Say(0, kA, true);  // of its half; the other one is rank 1's, who gives nothing
  Say(0, kC, false);
  Say(1, kC, false);
  Submit(0, kA, 2);
  Submit(1, kC, 4);
  AwaitSlot(0, kC);
  AwaitSlot(1, kA);
  Submit(0, kC, 2);
  Submit(1, kA, 4);
  Done(0);
  Done(1);
  StepAll(1);
  EXPECT_EQ(Counters().early_folds(), 2u);
  EXPECT_EQ(Shard(kA)[0], -8);
  EXPECT_EQ(Shard(kA)[kLarge - 1], -3);
  EXPECT_EQ(Shard(kC)[0], -3);
}

class FrozenPresenceTest : public PresenceTest {
 protected:
  static SpecBuilder Frozen() {
    SpecBuilder builder = TwoGroups();
    ParamOptions options;
    options.requires_grad = false;
    builder.Param(1, "frozen", {4}, options);
    return builder;
  }
  FrozenPresenceTest() : PresenceTest(Frozen()) {}
};

TEST_F(FrozenPresenceTest, FrozenParameterIsRefusedByName) {
  v1::Command command;
  command.mutable_set_gradient_presence()->set_param(plan_->FindParam("a.frozen"));
  Send(0, command);
  ASSERT_FALSE(Alive());
  EXPECT_NE(Error().find("\"a.frozen\": the parameter is frozen"), std::string::npos) << Error();
}

// Parameters of one row in rows: rank 0 holds all of them.
class OneHolderPresenceTest : public PresenceTest {
 protected:
  static SpecBuilder OneRow() {
    SpecBuilder builder(kRanks);
    builder.config().set_layout(v1::LAYOUT_DIM0);
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
    builder.Param(0, "root", {kNumel});
    for (const char* name : {"a", "b"}) {
      builder.Param(builder.AddSharded(0, name), "w", {1, kNumel});
    }
    return builder;
  }
  OneHolderPresenceTest() : PresenceTest(OneRow()) {}
};

TEST_F(OneHolderPresenceTest, WhatItsHolderDropsIsDropped) {
  std::fill_n(Shard(kB), kNumel, 1.0f);
  BackwardOfAll();
  Say(0, kB, false);
  StepAll(1, /*weight_decay=*/0.5);
  EXPECT_EQ(First(kB), 1) << "no update, no decay";
  EXPECT_EQ(First(kA), -3);
}

TEST_F(OneHolderPresenceTest, WhatAnotherRankSaysIsNotLookedAt) {
  BackwardOfAll();
  Say(1, kB, false);
  StepAll(1);
  EXPECT_EQ(First(kB), -3);
  EXPECT_EQ(Last(kB), -3);
}

TEST_F(OneHolderPresenceTest, GradientsReplaceOrAddAsItsHolderSays) {
  BackwardOfAll();
  for (int group : {kB, kA}) {
    Submit(0, group, 2, /*fresh=*/group == kB);
    Submit(1, group, 4, /*fresh=*/group == kA);
  }
  Done(0);
  Done(1);
  StepAll(1);
  EXPECT_EQ(First(kB), -3) << "replaced";
  EXPECT_EQ(First(kA), -6) << "added";
}

// Every rank owns everything: what one of them gives is the gradient.
class ReplicatedPresenceTest : public PresenceTest {
 protected:
  static SpecBuilder Replicated() {
    SpecBuilder builder = TwoGroups();
    builder.config().set_strategy(v1::STRATEGY_NO_SHARD);
    return builder;
  }
  ReplicatedPresenceTest() : PresenceTest(Replicated()) {}
};

TEST_F(ReplicatedPresenceTest, WhatARankGivesIsNotZeroedForAnother) {
  std::fill_n(Gradient(kA), kNumel, 5.0f);
  Say(1, kA, true);
  StepAll(1);
  EXPECT_EQ(First(kA), -5);
  EXPECT_EQ(Last(kA), -5);
}

// Two replicas, each with a copy of all: what is read is copy 0, whoever has given.
class ReplicasPresenceTest : public PresenceTest {
 protected:
  static SpecBuilder Replicas() {
    SpecBuilder builder = TwoGroups();
    builder.config().set_strategy(v1::STRATEGY_HYBRID_SHARD);
    builder.config().set_shard_group_size(1);
    builder.config().set_replica_copies(true);
    return builder;
  }
  ReplicasPresenceTest() : PresenceTest(Replicas()) {}
  void SetUp() override { ASSERT_EQ(plan_->gradient_copies, 2); }
  void GiveCopy(int rank, int group, float value) {
    std::fill_n(Copy(rank, group), kNumel, value);
    Say(rank, group, true);
  }
  float* Copy(int copy, int group) { return Gradient(group) + copy * plan_->gradients_stride_bytes / 4; }
};

TEST_F(ReplicasPresenceTest, GivenByTheSecondReplicaAloneIsWhatCounts) {
  std::fill_n(Gradient(kA), kNumel, 99.0f);  // of no meaning
  GiveCopy(1, kA, 5);
  StepAll(1);
  EXPECT_EQ(First(kA), -5);
  EXPECT_EQ(Last(kA), -5);
  EXPECT_EQ(First(kB), 0);
}

TEST_F(ReplicasPresenceTest, DroppedByTheFirstReplicaIsTheSecondOnes) {
  BackwardOfAll();
  std::fill_n(Gradient(kB), kNumel, 99.0f);  // after the drop of no meaning
  Say(0, kB, false);
  StepAll(1);
  EXPECT_EQ(First(kB), -3);
  EXPECT_EQ(Last(kB), -3);
}

TEST_F(ReplicasPresenceTest, DroppedByTheSecondReplicaIsTheFirstOnes) {
  BackwardOfAll();
  std::fill_n(Copy(1, kB), kNumel, 99.0f);
  Say(1, kB, false);
  StepAll(1);
  EXPECT_EQ(First(kB), -3);
  EXPECT_EQ(Last(kB), -3);
}

TEST_F(ReplicasPresenceTest, TheSecondReplicasGradientIsAddedToAndReachesBoth) {
  std::fill_n(Gradient(kA), kNumel, 99.0f);
  GiveCopy(1, kA, 5);
  BackwardOfAll();
  EXPECT_EQ(Copy(0, kA)[0], 8);
  EXPECT_EQ(Copy(1, kA)[kNumel - 1], 8);
  StepAll(1);
  EXPECT_EQ(First(kA), -8);
}

TEST_F(ReplicasPresenceTest, GivenByTheSecondReplicaIsInTheNorm) {
  std::fill_n(Gradient(kA), kNumel, 99.0f);
  GiveCopy(1, kA, 5);
  StepAll(1, /*weight_decay=*/0, /*max_grad_norm=*/4);
  EXPECT_NEAR(First(kA), -0.5f, 1e-5) << "clipped by its own norm, 40";
}

}  // namespace
}  // namespace shardd
