#include "server/job/writes/snapshot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

TEST_F(SnapshotTest, IsDueOnceTheShardsChangedOtherwise) {
  snapshot_.Taken(1, {});
  snapshot_.Outdate();
  EXPECT_TRUE(snapshot_.IsDueBeforeHandIn());
  EXPECT_TRUE(snapshot_.whole()) << "there is one to go back to until the next is taken";
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
