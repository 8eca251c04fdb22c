#include "server/job/gradients/reductions.h"

#include "server/multinode/given_gradients.h"
#include "tests/server/job/gradients/kept_sums.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ReductionsTest : public KeptSumsTest {
 protected:
  static constexpr PairKey kKey{/*backward=*/0, kGroup};
  void SubmitAndAdd(int rank, int group = kGroup, uint64_t done = 0) {
    Submit(rank, group, done);
    absl::Status added;
    loop_.RunAndWait([&] { added = reductions_.AddComplete({0, group}); });  // it may set the loop's timer
    ASSERT_TRUE(added.ok()) << added;
  }
  void Close(int rank) { ASSERT_TRUE(reductions_.AddClosed(rank, pairing_.Close(rank, /*done=*/0)).ok()); }

  Reductions reductions_{plan_, SeenByReductions(), UsedByReductions(), &pairing_};
};

TEST_F(ReductionsTest, AnOccurrenceIsAddedWhenAllRanksHaveGivenIt) {
  SubmitAndAdd(0);
  EXPECT_TRUE(sums_.requests.empty());
  SubmitAndAdd(1);
  ASSERT_EQ(sums_.requests.size(), 1u);
  EXPECT_THAT(RanksOf(sums_.requests[0]), ElementsAre(0, 1));
  EXPECT_EQ(sums_.requests[0].scale, 0.5f) << "the mean";
  EXPECT_TRUE(reductions_.under_way());
  EXPECT_EQ(work_.gradient_work(), 1);
  EndSum(0);
  EXPECT_FALSE(reductions_.under_way());
  EXPECT_FALSE(pairing_.HoldsSlot(0, plan_->groups[kGroup].gradient_slot));
  EXPECT_EQ(counters_.reductions(), 1);
}

TEST_F(ReductionsTest, WhoHasClosedTheBackwardIsNotWaitedFor) {
  SubmitAndAdd(0);
  Close(0);
  EXPECT_FALSE(reductions_.AddClosed(1, pairing_.Close(1, /*done=*/0)).ok()) << "without the group";
}

TEST_F(ReductionsTest, ASlotIsReadBehindItsSignal) {
  SubmitAndAdd(0, kGroup, /*done=*/1);
  SubmitAndAdd(1);
  EXPECT_TRUE(sums_.requests.empty());
  EXPECT_TRUE(reductions_.under_way());
  EXPECT_FALSE(pairing_.HoldsSlot(0, plan_->groups[kGroup].gradient_slot)) << "its device waits by itself";
  Signal(0, 1);
  absl::Status status;
  ASSERT_TRUE(given_back_.RunNext(&status));
  EXPECT_EQ(sums_.requests.size(), 1u);
}

TEST_F(ReductionsTest, RanksAreToldOnceOfBackwardsThatAllHaveClosed) {
  SubmitAndAdd(0);
  SubmitAndAdd(1);
  Close(0);
  EXPECT_FALSE(reductions_.OwesWord());
  Close(1);
  EXPECT_TRUE(reductions_.OwesWord()) << "all is under way";
  reductions_.Publish();
  EXPECT_FALSE(reductions_.OwesWord());
  EndSum(0);
  EXPECT_TRUE(reductions_.OwesWord()) << "all is added";
  reductions_.Publish();
  EXPECT_FALSE(reductions_.OwesWord());
  reductions_.EndStep();
  EXPECT_TRUE(reductions_.OwesWord()) << "the next step counts from 0";
}

TEST_F(ReductionsTest, AFailureEndsTheEpoch) {
  SubmitAndAdd(0);
  SubmitAndAdd(1);
  EndSum(0, absl::InternalError("device"));
  EXPECT_EQ(job_.failure().message(), "device");
}

TEST_F(ReductionsTest, WhatEndsBehindItsEpochChangesNothing) {
  SubmitAndAdd(0);
  SubmitAndAdd(1);
  committed_.EndEpoch();
  reductions_.EndEpoch();
  EXPECT_FALSE(reductions_.under_way());
  EndSum(0, absl::InternalError("late"));
  EXPECT_TRUE(job_.failed.empty());
  EXPECT_FALSE(reductions_.under_way());
  EXPECT_EQ(work_.gradient_work(), 0);
}

TEST_F(ReductionsTest, StuckRanksAreAddedBeforeTheirTurn) {
  SubmitAndAdd(0, /*group=*/0);
  SubmitAndAdd(1, kGroup);
  pairing_.Sleep(0, plan_->groups[0].gradient_slot);
  EXPECT_FALSE(reductions_.AllStuck()) << "rank 1 may still go on";
  pairing_.Sleep(1, plan_->groups[kGroup].gradient_slot);
  EXPECT_TRUE(reductions_.AllStuck());
  ASSERT_TRUE(reductions_.AddBeforeTurn().ok());
  ASSERT_EQ(sums_.requests.size(), 2u);
  EXPECT_THAT(RanksOf(sums_.requests[0]), ElementsAre(0));
  EXPECT_THAT(RanksOf(sums_.requests[1]), ElementsAre(1));
  EXPECT_EQ(counters_.early_folds(), 2);
}

class ReductionsOverNodesTest : public ReductionsTest {
 protected:
  ReductionsOverNodesTest() {
    reductions_.AddOverNodes(
        {[this](PairKey key, const Pairing::Said& said) { said_.emplace_back(key, said.occurrence); },
         [this] { return closed_; }, [] { return uint64_t{7}; }});
  }
  std::vector<std::pair<PairKey, int>> said_;
  int closed_ = 0;  // by all nodes
};

TEST_F(ReductionsOverNodesTest, CompleteOnesAreToldAndReducedWhenAllNodesContribute) {
  SubmitAndAdd(0);
  SubmitAndAdd(1);
  EXPECT_THAT(said_, ElementsAre(std::pair(kKey, 0)));
  EXPECT_TRUE(sums_.requests.empty());
  GivenGradients given;
  given.present = given.fresh = {true};
  given.sequence = 3;
  ASSERT_TRUE(reductions_.AddGiven(kKey, /*occurrence=*/0, given).ok());
  ASSERT_EQ(sums_.requests.size(), 1u);
  EXPECT_EQ(sums_.requests[0].nodes->generation, 7u);
  EXPECT_EQ(sums_.requests[0].nodes->sequence, 3u);
  EXPECT_TRUE(sums_.requests[0].staging.empty());
}

TEST_F(ReductionsOverNodesTest, WhereThisNodeGivesNothingTheOthersAreAdded) {
  GivenGradients given;
  given.present = given.fresh = {true};
  ASSERT_TRUE(reductions_.AddGiven(kKey, /*occurrence=*/0, given).ok());
  ASSERT_EQ(sums_.requests.size(), 1u);
  EXPECT_TRUE(sums_.requests[0].sources.empty());
  EXPECT_TRUE(pairing_.any_seen());
}

TEST_F(ReductionsOverNodesTest, ABackwardIsClosedWhenAllNodesHaveClosedIt) {
  Close(0);
  Close(1);
  EXPECT_FALSE(reductions_.OwesWord());
  closed_ = 1;
  EXPECT_TRUE(reductions_.OwesWord());
}

TEST_F(ReductionsOverNodesTest, NothingIsAddedBeforeItsTurn) {
  EXPECT_THAT(std::string(reductions_.AddBeforeTurn().message()), HasSubstr("submit groups in the same order"));
}

}  // namespace
}  // namespace shardd
