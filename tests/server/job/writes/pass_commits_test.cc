#include "server/job/writes/pass_commits.h"

#include "server/storage/take_up_log.h"
#include "tests/server/job/commits_fixture.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class PassCommitsTest : public CommitsFixture {
 protected:
  using CommitsFixture::CommitsFixture;
  void EnterAll(bool stepped = false) { ASSERT_TRUE(Enter(0, stepped, "a").ok() && Enter(1, stepped, "b").ok()); }
  bool AllInside() const { return writes_.passes().inside(0) && writes_.passes().inside(1); }
};

TEST_F(PassCommitsTest, APassWithoutStoresBeginsAtOnce) {
  EnterAll();
  ASSERT_TRUE(pass_commits_.Commit().ok());
  EXPECT_TRUE(AllInside());
  EXPECT_EQ(counters_.passes(), 1);
  EXPECT_EQ(committed_.version(), 1u);
  EXPECT_THAT(committed_.trainer_states(), ElementsAre("a", "b"));
}

TEST_F(PassCommitsTest, WhatRanksKeepWithoutAStoreOutlivesTheDaemon) {
  auto log = *TakeUpLog::Create({.place_bytes = 4096, .ranks = 2});
  const TakeUpLog& left = *log;
  committed_.KeepIn(std::move(log));
  EnterAll();
  ASSERT_TRUE(pass_commits_.Commit().ok());
  EXPECT_THAT(left.Read()->facts.trainer_states(), ElementsAre("a", "b"));
  EXPECT_EQ(left.Read()->header.version, committed_.version());
}

TEST_F(PassCommitsTest, ASnapshotIsTakenBeforeTheFirstRankHandsIn) {
  ASSERT_TRUE(writes_.AskToHandIn(0).ok());
  pass_commits_.LetHandIn();
  EXPECT_TRUE(snapshots_.snapshot().taking());
  EXPECT_FALSE(writes_.hand_ins().open(0));
  End();
  pass_commits_.LetHandIn();
  EXPECT_TRUE(writes_.hand_ins().open(0));
}

TEST_F(PassCommitsTest, HandedInEditsAreAVersionBeforeThePassBegins) {
  ASSERT_TRUE(writes_.AskToHandIn(0).ok());
  writes_.LetHandIn();
  EnterAll();
  ASSERT_TRUE(pass_commits_.Commit().ok());
  EXPECT_THAT(device_.labels(), ElementsAre("cast version 2", "cast version 2"));
  EXPECT_FALSE(commits_.MayEndEpoch());
  End();
  EXPECT_EQ(committed_.version(), 2u);
  EXPECT_EQ(counters_.hand_ins(), 1);
  EXPECT_FALSE(AllInside()) << "somebody may have died meanwhile";
  ASSERT_TRUE(pass_commits_.Commit().ok());
  EXPECT_TRUE(AllInside());
}

TEST_F(PassCommitsTest, RanksThatDifferInTheirStepAreRefused) {
  ASSERT_TRUE(Enter(0, /*stepped=*/true).ok() && Enter(1).ok());
  EXPECT_THAT(pass_commits_.Commit().message(), HasSubstr("ranks differ in whether they made an optimizer step"));
}

class PassCommitsWithCopiesTest : public PassCommitsTest {
 protected:
  PassCommitsWithCopiesTest() : PassCommitsTest(/*pass_copies=*/true) {}
  void BeginPass(bool stepped) {
    EnterAll(stepped);
    ASSERT_TRUE(pass_commits_.Announce(/*tell=*/true).ok());
    ASSERT_TRUE(pass_commits_.CommitBehindDevices().ok());
  }
};

TEST_F(PassCommitsWithCopiesTest, CopiesAreMadeThenTheSnapshotThenTheVersion) {
  BeginPass(/*stepped=*/false);
  EXPECT_THAT(device_.labels(), ElementsAre("copy version 2", "copy version 2"));
  End();
  EXPECT_THAT(device_.labels(), ElementsAre("keep step 0", "keep step 0"));
  EXPECT_FALSE(writes_.passes().copied());
  End();
  EXPECT_EQ(committed_.version(), 2u);
  EXPECT_EQ(committed_.step(), 0);
  EXPECT_TRUE(writes_.passes().copied());
  EXPECT_TRUE(snapshots_.snapshot().whole());
}

TEST_F(PassCommitsWithCopiesTest, AStepOfTheTrainersIsCommittedWithThePass) {
  BeginPass(/*stepped=*/true);
  End();
  End();
  EXPECT_EQ(committed_.step(), 1);
  EXPECT_THAT(committed_.trainer_states(), ElementsAre("a", "b"));
  EXPECT_EQ(counters_.commits(), 1);
  EXPECT_FALSE(writes_.passes().stepped(0));
}

TEST_F(PassCommitsWithCopiesTest, CopiesThatFailCloseTheJob) {
  BeginPass(/*stepped=*/false);
  End(absl::InternalError("torn"));
  EXPECT_EQ(job_.why_closed(), "copies for a pass: torn");
}

TEST_F(PassCommitsWithCopiesTest, WhoAsksMayStoreWhenNobodyReadsFullParameters) {
  ASSERT_TRUE(writes_.AskToHandIn(0).ok());
  ASSERT_TRUE(pass_commits_.LetStore().ok());
  EXPECT_FALSE(writes_.hand_ins().wants(0));
  EXPECT_FALSE(writes_.hand_ins().open(0)) << "nobody hands in";
}

}  // namespace
}  // namespace shardd
