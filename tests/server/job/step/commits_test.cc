#include "server/job/step/commits.h"

#include "common/clock/monotonic_now.h"
#include "server/job/membership/silence.h"
#include "tests/server/job/commits_fixture.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CommitsTest : public CommitsFixture {
 protected:
  void StepAll(const v1::Step& step = OneGroup()) {
    ASSERT_TRUE(Step(0, step).ok() && Step(1, step).ok());
    ASSERT_TRUE(commits_.BeginDecision().ok());
  }
};

class PartsTest : public CommitsFixture {
 protected:
  PartsTest() : CommitsFixture(/*pass_copies=*/false, /*several=*/true) {}
  static v1::Step Part() {
    v1::Step step;
    for (int group = 0; group < 3; ++group) step.add_groups()->set_lr(0.5);
    step.add_left_groups(2);
    step.set_part(true);
    return step;
  }
};

TEST_F(PartsTest, ARankThatDoesNotWaitForItsPartIsBetweenParts) {
  ASSERT_TRUE(commits_.CheckBetweenParts(0, Opcode::kUnshard).ok());
  ASSERT_TRUE(Step(0, Part()).ok());
  EXPECT_THAT(commits_.CheckBetweenParts(0, Opcode::kUnshard).message(), HasSubstr("send Step without `part` first"));
  EXPECT_TRUE(commits_.CheckBetweenParts(0, Opcode::kReshard).ok());
  EXPECT_TRUE(commits_.CheckBetweenParts(1, Opcode::kUnshard).ok()) << "it has sent none";
}

TEST_F(PartsTest, APartOfAClosedJobUpdatesNothing) {
  gradients_.presence().Set(0, true);
  ASSERT_TRUE(Step(0, Part()).ok() && Step(1, Part()).ok());
  ASSERT_TRUE(commits_.BeginDecision().ok());
  EXPECT_THAT(device_.labels(), ElementsAre("keep for a part of step 1", "keep for a part of step 1"));
  committed_.EndEpoch();
  End();
  EXPECT_THAT(device_.labels(), IsEmpty());
  EXPECT_EQ(job_.why_closed(), "");
}

// It may take the daemon longer than a rank may be silent.
TEST_F(PartsTest, NoRankIsSilentWhileItsPartIsMade) {
  constexpr absl::Duration kLimit = absl::Seconds(120);
  const auto silent = [this, kLimit] {
    int rank = -1;
    (void)CheckSilentRanks(
        sessions_, committed_, kLimit, MonotonicNow(),
        [](int waits) {
          return waits == 0 ? Wait{1, "Step"} : Wait();
        },
        &rank);
    return rank;
  };
  gradients_.presence().Set(0, true);
  ASSERT_TRUE(Step(0, Part()).ok() && Step(1, Part()).ok());
  for (const int rank : {0, 1}) sessions_[rank]->last_command_time = MonotonicNow() - 2 * kLimit;
  EXPECT_EQ(silent(), 1) << "it has sent nothing since";
  ASSERT_TRUE(commits_.BeginDecision().ok());
  for (int waits = 0; waits < 10 && !commits_.decision().applied(); ++waits) End();
  ASSERT_TRUE(commits_.MayShow());
  commits_.Show();
  ASSERT_EQ(commits_.decision().parts(), 1);
  EXPECT_EQ(silent(), -1);
}

TEST_F(PartsTest, OverNodesAPartIsShownThoughNobodyHoldsIt) {
  std::vector<std::string> said;
  commits_.SpanNodes({/*node=*/0, [] { return int64_t{0}; }, [&](const Norm&) { said.emplace_back("reduced"); },
                      [] { FAIL(); }, [&] { said.emplace_back("part"); }, [&] { said.emplace_back("made"); },
                      [] { return uint64_t{7}; }});
  gradients_.presence().Set(0, true);
  ASSERT_TRUE(Step(0, Part()).ok() && Step(1, Part()).ok());
  ASSERT_TRUE(commits_.BeginDecision().ok());
  EXPECT_THAT(device_.labels(), IsEmpty());
  commits_.Measured(2);
  for (int waits = 0; waits < 10 && !commits_.decision().applied(); ++waits) End();
  EXPECT_TRUE(commits_.decision().has_uncommitted());
  EXPECT_FALSE(commits_.decision().decided()) << "the nodes' step is what it was";
  ASSERT_TRUE(commits_.MayShow());
  commits_.Show();
  EXPECT_THAT(said, ElementsAre("reduced", "part", "made"));
  EXPECT_TRUE(commits_.decision().has_uncommitted());
  EXPECT_TRUE(commits_.MayEndEpoch());
}

TEST_F(CommitsTest, AStepIsUpdatedShownAndCommitted) {
  ASSERT_TRUE(Step(0).ok());
  EXPECT_EQ(commits_.WaitingToStep(0).rank, 1);
  ASSERT_TRUE(Step(1).ok());
  ASSERT_TRUE(commits_.BeginDecision().ok());
  EXPECT_THAT(device_.labels(), ElementsAre("update step 1", "update step 1"));
  EXPECT_TRUE(commits_.decision().committing());
  EXPECT_FALSE(commits_.MayEndEpoch());
  End();
  EXPECT_TRUE(commits_.decision().applied());
  EXPECT_TRUE(commits_.MayShow());
  commits_.Show();
  EXPECT_EQ(committed_.step(), 1);
  EXPECT_EQ(committed_.version(), 2u);
  EXPECT_EQ(counters_.commits(), 1);
  EXPECT_FALSE(commits_.steps().any_stepped());
  EXPECT_FALSE(commits_.decision().committing());
}

TEST_F(CommitsTest, TheNormIsMeasuredBeforeTheUpdate) {
  v1::Step step = OneGroup();
  step.set_max_grad_norm(1);
  StepAll(step);
  EXPECT_THAT(device_.labels(), ElementsAre("norm step 1", "norm step 1"));
  EXPECT_FALSE(commits_.decision().committing()) << "nothing is decided yet";
  End();
  EXPECT_THAT(device_.labels(), ElementsAre("update step 1", "update step 1"));
}

TEST_F(CommitsTest, AnEpochsEndDropsTheStepBeingMeasured) {
  v1::Step step = OneGroup();
  step.set_max_grad_norm(1);
  StepAll(step);
  committed_.EndEpoch();
  parts_.EndEpoch();
  End();
  EXPECT_THAT(device_.labels(), IsEmpty());
  EXPECT_FALSE(commits_.steps().any_stepped());
  EXPECT_EQ(committed_.step(), 0);
}

TEST_F(CommitsTest, ADecisionThatTheJournalRefusesChangesNothing) {
  v1::Step step = OneGroup();
  step.set_trainer_state(std::string(8192, 'x'));
  StepAll(step);
  EXPECT_EQ(job_.failure().code(), absl::StatusCode::kResourceExhausted) << job_.failure();
  EXPECT_THAT(device_.labels(), IsEmpty());
}

TEST_F(CommitsTest, AnUpdateThatFailsClosesTheJob) {
  StepAll();
  End(absl::InternalError("torn"));
  EXPECT_EQ(job_.why_closed(), "update of step 1: torn");
}

TEST_F(CommitsTest, RanksThatAskForDifferentStepsAreRefused) {
  v1::Step other = OneGroup();
  other.mutable_groups(0)->set_lr(0.25);
  ASSERT_TRUE(Step(0).ok() && Step(1, other).ok());
  EXPECT_THAT(commits_.BeginDecision().message(), HasSubstr("hyperparameters of rank 1 differ from rank 0's"));
}

TEST_F(CommitsTest, ARankStepsOnceAndNotInAPass) {
  ASSERT_TRUE(Step(0).ok());
  EXPECT_THAT(Step(0).message(), HasSubstr("the rank has already sent Step for this step"));
  ASSERT_TRUE(Enter(1).ok());
  EXPECT_THAT(Step(1).message(), HasSubstr("the rank is waiting for a pass, or to hand in"));
}

TEST_F(CommitsTest, OverNodesAStepIsVisibleOnceAllAcknowledgeIt) {
  int64_t held = 0;
  std::vector<std::string> said;
  commits_.SpanNodes({/*node=*/0, [&] { return held; }, [&](const Norm&) { said.emplace_back("reduced"); },
                      [&] { said.emplace_back("decided"); }, [] { FAIL(); }, [] { FAIL(); },
                      [] { return uint64_t{7}; }});
  StepAll();
  EXPECT_THAT(said, ElementsAre("reduced"));
  EXPECT_THAT(device_.labels(), IsEmpty());
  commits_.Measured(2);
  EXPECT_THAT(said, ElementsAre("reduced", "decided"));
  EXPECT_FALSE(commits_.MayEndEpoch());
  End();
  EXPECT_FALSE(commits_.MayShow());
  EXPECT_TRUE(commits_.MayEndEpoch()) << "another node may be silent for long";
  held = 1;
  EXPECT_TRUE(commits_.MayShow());
  EXPECT_FALSE(commits_.MayEndEpoch());
}

// Node 0 has decided it: there is no way back.
TEST_F(CommitsTest, AnUnjournaledStepOfOtherNodesClosesTheJob) {
  commits_.SpanNodes({/*node=*/1, [] { return int64_t{0}; }, [](const Norm&) {}, [] { FAIL(); }, [] { FAIL(); },
                      [] { FAIL(); }, [] { return uint64_t{7}; }});
  v1::Step step = OneGroup();
  step.set_trainer_state(std::string(8192, 'x'));
  StepAll(step);
  commits_.Heard({});
  EXPECT_THAT(job_.why_closed(), HasSubstr("step 1 is decided on all nodes: "));
}

TEST_F(CommitsTest, ValuesBecomeAVersionWhenTheirCastHasEnded) {
  values_.Commit();
  EXPECT_THAT(device_.labels(), ElementsAre("cast version 2", "cast version 2"));
  EXPECT_FALSE(commits_.MayEndEpoch());
  End();
  EXPECT_EQ(committed_.version(), 2u);
  EXPECT_EQ(committed_.step(), 0);
  EXPECT_TRUE(commits_.MayEndEpoch());
}

TEST_F(CommitsTest, AVersionThatCannotBeMadeClosesTheJob) {
  values_.Commit();
  End(absl::InternalError("torn"));
  EXPECT_EQ(job_.why_closed(), "commit of parameters: torn");
  EXPECT_EQ(committed_.version(), 1u);
}

}  // namespace
}  // namespace shardd
