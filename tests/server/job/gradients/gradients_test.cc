#include "server/job/gradients/gradients.h"

#include "server/job/job_events.h"
#include "server/observe/events.h"
#include "server/tenant/tenant.h"
#include "tests/server/job/gradients/kept_sums.h"

namespace shardd {
namespace {

class RanksGradientsTest : public KeptSumsTest {
 protected:
  RanksGradientsTest() { committed_.CommitVersion(); }
  absl::Status Give(int rank, int group = kGroup) {
    Session* session = sessions_[rank].get();
    Handle& handle = session->handles[static_cast<size_t>(group)];
    EXPECT_TRUE(handle.Apply(HandleEvent::kUnshardBackward, "group", rank).ok());
    EXPECT_TRUE(handle.Apply(HandleEvent::kUnshardDone, "group", rank).ok());
    RankCommand command;
    command.group = group;
    return gradients_.Submit(session, std::move(command));
  }
  absl::Status CloseBackward(int rank, int64_t index) {
    RankCommand command;
    command.arg0 = index;
    return gradients_.CloseBackward(sessions_[rank].get(), command);
  }
  bool HoldsSlot(int rank) const { return gradients_.pairing().HoldsSlot(rank, plan_->groups[kGroup].gradient_slot); }

  EventLog log_;
  JobEvents events_{"job", Tenant{}, &committed_, &log_};
  Gradients gradients_{plan_, {SeenByReductions(), &decision_, &extensions_}, {UsedByReductions(), &events_}};
};

TEST_F(RanksGradientsTest, WhatBothRanksGiveIsAdded) {
  ASSERT_TRUE(Give(0).ok());
  EXPECT_TRUE(sums_.requests.empty());
  ASSERT_TRUE(Give(1).ok());
  EXPECT_EQ(sums_.requests.size(), 1u);
  EXPECT_EQ(counters_.gradient_submissions(), 2);
}

TEST_F(RanksGradientsTest, NothingIsGivenWhileTheStepIsBeingCommitted) {
  decision_.BeginCommit();
  ExpectRefused(Give(0), "the step is being committed");
}

TEST_F(RanksGradientsTest, BackwardsAreClosedInTheirOrder) {
  ExpectRefused(CloseBackward(0, 1), "wrong index (got 1, want 0)");
  ASSERT_TRUE(CloseBackward(0, 0).ok());
  steps_.Ask(0, v1::Step(), /*signal=*/0);
  ExpectRefused(CloseBackward(0, 1), "the rank has sent Step");
}

TEST_F(RanksGradientsTest, ABackwardThatIsGivenUpIsTakenBack) {
  ASSERT_TRUE(Give(0).ok());
  EXPECT_TRUE(HoldsSlot(0));
  ASSERT_TRUE(gradients_.Abandon(sessions_[0].get()).ok());
  EXPECT_FALSE(HoldsSlot(0));
  EXPECT_TRUE(sessions_[0]->gave_up);
  EXPECT_EQ(counters_.abandons(), 1);
}

TEST_F(RanksGradientsTest, OverNodesABackwardWithGradientsIsNotGivenUp) {
  gradients_.reductions().AddOverNodes(
      {[](PairKey, const Pairing::Said&) {}, [] { return 0; }, [] { return uint64_t{0}; }});
  ASSERT_TRUE(gradients_.Abandon(sessions_[0].get()).ok()) << "nothing was given";
  ASSERT_TRUE(Give(0).ok());
  ExpectRefused(gradients_.Abandon(sessions_[0].get()), "were given to other nodes");
}

TEST_F(RanksGradientsTest, ARankSleepsForASlotThatIsFull) {
  gradients_.Sleep(0, kGroup);
  EXPECT_FALSE(gradients_.pairing().sleeps(0)) << "it is free";
  ASSERT_TRUE(Give(0).ok());
  gradients_.Sleep(0, kGroup);
  EXPECT_TRUE(gradients_.pairing().sleeps(0));
  gradients_.Wake(0);
  EXPECT_FALSE(gradients_.pairing().sleeps(0));
}

TEST_F(RanksGradientsTest, TheNextStepBeginsWithNothing) {
  ASSERT_TRUE(CloseBackward(0, 0).ok() && CloseBackward(1, 0).ok());
  ASSERT_TRUE(gradients_.CloseStep(0).ok() && gradients_.CloseStep(1).ok());
  gradients_.StepCommitted();
  EXPECT_EQ(gradients_.pairing().closed(0), 0);
  EXPECT_FALSE(gradients_.reductions().OwesWord());
}

}  // namespace
}  // namespace shardd
