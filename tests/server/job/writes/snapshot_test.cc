#include "server/job/writes/snapshot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/time.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;

// When it is due, and what of; its bytes are copied in hand_in_test.cc and pass_copies_test.cc.
class SnapshotTest : public ::testing::Test {
 protected:
  static ShardPlan Plan() {
    SpecBuilder builder;
    builder.config().set_trainers_never_write(false);
    builder.config().set_pass_copies(true);
    builder.config().set_keep_every(2);
    builder.Param(0, "w", {8});
    return builder.Plan();
  }
  const ShardPlan plan_ = Plan();
  Snapshot snapshot_{&plan_, /*memory=*/nullptr, /*devices=*/nullptr};
};

TEST_F(SnapshotTest, IsDueBeforeTheFirstHandIn) {
  EXPECT_FALSE(snapshot_.whole());
  EXPECT_TRUE(snapshot_.IsDueBeforeHandIn());
  EXPECT_TRUE(snapshot_.IsDueWithPass());
}

TEST_F(SnapshotTest, IsDueAgainAfterSoManyVersionsAsConfigured) {
  snapshot_.BeginTaking();
  EXPECT_TRUE(snapshot_.taking());
  snapshot_.Taken(1, {"a", "b"});
  EXPECT_FALSE(snapshot_.taking());
  EXPECT_FALSE(snapshot_.IsDueBeforeHandIn());
  EXPECT_FALSE(snapshot_.IsDueWithPass());
  snapshot_.Age();
  EXPECT_FALSE(snapshot_.IsDueBeforeHandIn());
  EXPECT_TRUE(snapshot_.IsDueWithPass()) << "with the commit that makes the next version";
  snapshot_.Age();
  EXPECT_TRUE(snapshot_.IsDueBeforeHandIn());
}

TEST_F(SnapshotTest, OneThatIsBehindCountsAsTheLastOne) {
  snapshot_.BeginTakingWithCommit();
  snapshot_.BeginBehind();
  ASSERT_TRUE(snapshot_.CommitBehind());
  snapshot_.OfCommitted(1, {"a", "b"});
  EXPECT_FALSE(snapshot_.whole());
  EXPECT_FALSE(snapshot_.IsDueWithPass());
  snapshot_.Age();
  EXPECT_TRUE(snapshot_.IsDueWithPass());
}

TEST_F(SnapshotTest, IsDueOnceTheShardsChangedOtherwise) {
  snapshot_.Taken(1, {});
  snapshot_.Outdate();
  EXPECT_TRUE(snapshot_.IsDueBeforeHandIn());
  EXPECT_TRUE(snapshot_.whole()) << "there is one to go back to until the next is taken";
}

// Of trainers with their own optimizer, whose job does not say how often.
class SnapshotByCostTest : public ::testing::Test {
 protected:
  static ShardPlan Plan() {
    SpecBuilder builder;
    builder.config().set_trainers_never_write(false);
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
    builder.config().mutable_optimizer()->set_trainer_states(1);
    builder.Param(0, "w", {8});
    return builder.Plan();
  }
  // A pass of `step` ends with another one's begin; returns whether a snapshot is due, and takes it then.
  bool PassOf(absl::Duration step, absl::Duration cost) {
    now_ += step;
    snapshot_.PassBegins(now_);
    const bool due = snapshot_.IsDueWithPass();
    if (due) {
      snapshot_.CopyBegins(now_);
      now_ += cost;
      snapshot_.CopyEnds(now_);
    }
    snapshot_.Age();
    if (due) snapshot_.Taken(++step_, {});
    return due;
  }
  // The same, where so much of the cost is copied while ranks compute.
  bool PassBehind(absl::Duration step, absl::Duration copy) {
    const bool due = PassOf(step, absl::ZeroDuration());
    if (due) snapshot_.TakenBehind(now_ + copy);
    return due;
  }
  // How many passes of ten had one.
  int DueOfTen(absl::Duration step, absl::Duration cost) {
    int due = 0;
    for (int pass = 0; pass < 10; ++pass) due += PassOf(step, cost);
    return due;
  }
  const ShardPlan plan_ = Plan();
  Snapshot snapshot_{&plan_, /*memory=*/nullptr, /*devices=*/nullptr};
  absl::Time now_ = absl::UnixEpoch();
  int64_t step_ = 0;
};

TEST_F(SnapshotByCostTest, EachPassHasOneWhereItIsCheap) {
  EXPECT_EQ(DueOfTen(absl::Milliseconds(100), absl::Milliseconds(3)), 10);
}

TEST_F(SnapshotByCostTest, EachPassHasOneWhereItIsCopiedBehind) {
  for (int pass = 0; pass < 10; ++pass)
    EXPECT_TRUE(PassBehind(absl::Milliseconds(100), absl::Milliseconds(49))) << pass;
}

TEST_F(SnapshotByCostTest, CopyingTakesNoMoreThanHalfOfTheTime) {
  for (int pass = 0; pass < 3; ++pass) PassBehind(absl::Milliseconds(100), absl::Milliseconds(80));
  int due = 0;
  for (int pass = 0; pass < 10; ++pass) due += PassBehind(absl::Milliseconds(100), absl::Milliseconds(80));
  EXPECT_EQ(due, 5);
}

// Whose shards are what passes read: the next commit makes those anew.
TEST_F(SnapshotByCostTest, OneInCopiesIsDueWithTheNextPass) {
  for (int pass = 0; pass < 4; ++pass) PassBehind(absl::Milliseconds(100), absl::Milliseconds(80));
  ASSERT_FALSE(snapshot_.IsDueByItself());
  EXPECT_FALSE(snapshot_.IsDueWithPass());
  snapshot_.ChooseInCopies(/*due=*/true, /*may_be=*/true);
  EXPECT_FALSE(snapshot_.IsDueByItself());
  EXPECT_TRUE(snapshot_.IsDueWithPass()) << "whatever it costs";
}

TEST_F(SnapshotByCostTest, PassesThatComeTooFastEndSnapshotsInCopies) {
  const auto choose = [this](bool due) {
    snapshot_.ChooseInCopies(due, /*may_be=*/true);
    return snapshot_.in_copies();
  };
  EXPECT_TRUE(choose(true));
  EXPECT_TRUE(choose(false)) << "a pass may be short for once";
  EXPECT_TRUE(choose(false));
  EXPECT_TRUE(choose(true));
  EXPECT_TRUE(choose(false) && choose(false));
  EXPECT_FALSE(choose(false));
  EXPECT_FALSE(choose(true)) << "from here on it has its shards itself";
}

TEST_F(SnapshotTest, OneThatPassesAreToLeaveAsItIsHasItsShardsItself) {
  SpecBuilder builder;
  builder.config().set_trainers_never_write(false);
  builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
  builder.config().mutable_optimizer()->set_trainer_states(1);
  builder.Param(0, "w", {8});
  for (const int keep_every : {1, 2}) {
    builder.config().set_keep_every(keep_every);
    const ShardPlan plan = builder.Plan();
    Snapshot snapshot(&plan, /*memory=*/nullptr, /*devices=*/nullptr);
    snapshot.ChooseInCopies(/*due=*/true, /*may_be=*/true);
    EXPECT_EQ(snapshot.in_copies(), keep_every == 1);
  }
}

// Moments of the daemon's optimizer change behind the copies that passes read.
TEST_F(SnapshotTest, OneOfTheDaemonsOptimizerHasItsShardsItself) {
  snapshot_.ChooseInCopies(/*due=*/true, /*may_be=*/true);
  EXPECT_FALSE(snapshot_.in_copies());
}

// The first snapshots touch their memory for the first time.
TEST_F(SnapshotByCostTest, FirstSnapshotsDoNotMakeTheNextOnesRare) {
  EXPECT_TRUE(PassOf(absl::Milliseconds(100), absl::Seconds(10)));
  for (int pass = 0; pass < 10; ++pass) EXPECT_TRUE(PassOf(absl::Milliseconds(100), absl::Milliseconds(2))) << pass;
}

TEST_F(SnapshotByCostTest, TakesNoMoreThanItsShareOfTheTime) {
  for (int pass = 0; pass < 3; ++pass) PassOf(absl::Milliseconds(100), absl::Milliseconds(6));
  EXPECT_EQ(DueOfTen(absl::Milliseconds(100), absl::Milliseconds(6)), 5);
  DueOfTen(absl::Milliseconds(100), absl::Milliseconds(7));
  int due = 0;
  for (int i = 0; i < 3; ++i) due += DueOfTen(absl::Milliseconds(100), absl::Milliseconds(7));
  EXPECT_EQ(due, 10);
}

TEST_F(SnapshotByCostTest, TenthPassHasOneWhateverItCosts) {
  for (int pass = 0; pass < 3; ++pass) EXPECT_TRUE(PassOf(absl::Milliseconds(100), absl::Seconds(10))) << pass;
  for (int pass = 1; pass < 10; ++pass) EXPECT_FALSE(PassOf(absl::Milliseconds(100), absl::Seconds(10))) << pass;
  EXPECT_TRUE(PassOf(absl::Milliseconds(100), absl::Seconds(10)));
}

TEST_F(SnapshotByCostTest, OneDelayDoesNotMakeThemRare) {
  EXPECT_EQ(DueOfTen(absl::Milliseconds(100), absl::Milliseconds(1)), 10);
  EXPECT_TRUE(PassOf(absl::Milliseconds(100), absl::Seconds(1)));
  EXPECT_TRUE(PassOf(absl::Milliseconds(100), absl::Milliseconds(1)));
}

TEST_F(SnapshotByCostTest, ADelayOfACopyBehindDoesNotMakeThemRare) {
  for (int pass = 0; pass < 5; ++pass) PassBehind(absl::Milliseconds(100), absl::Milliseconds(20));
  EXPECT_TRUE(PassBehind(absl::Milliseconds(100), absl::Seconds(10)));
  EXPECT_TRUE(PassBehind(absl::Milliseconds(100), absl::Milliseconds(20)));
}

TEST_F(SnapshotByCostTest, StaysDueUntilItIsTaken) {
  for (int pass = 0; pass < 3; ++pass) PassOf(absl::Milliseconds(100), absl::Milliseconds(6));
  now_ += absl::Milliseconds(200);
  snapshot_.PassBegins(now_);
  snapshot_.PassBegins(absl::UnixEpoch());
  EXPECT_TRUE(snapshot_.IsDueWithPass());
}

TEST_F(SnapshotTest, ThereIsNoneWhileItIsWrittenOver) {
  snapshot_.Taken(1, {});
  snapshot_.BeginTakingWithCommit();
  EXPECT_FALSE(snapshot_.whole());
  snapshot_.TakenWithCommit();
  EXPECT_FALSE(snapshot_.whole()) << "what it is of is not committed yet";
  EXPECT_TRUE(snapshot_.CommitTaken());
  EXPECT_FALSE(snapshot_.CommitTaken());
}

TEST_F(SnapshotTest, GoesBackToItsStepAndStates) {
  snapshot_.Taken(7, {"a", "b"});
  snapshot_.Age();
  snapshot_.GoBack();
  EXPECT_TRUE(snapshot_.going_back());
  EXPECT_EQ(snapshot_.step(), 7);
  EXPECT_THAT(snapshot_.trainer_states(), ElementsAre("a", "b"));
  EXPECT_FALSE(snapshot_.IsDueWithPass()) << "the shards are the copy again";
  snapshot_.EndGoBack();
  EXPECT_FALSE(snapshot_.going_back());
}

}  // namespace
}  // namespace shardd
