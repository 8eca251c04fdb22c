// Ranks do not leave a pass at the same moment: whom it troubles that one of them has finished while others are inside.

#include <algorithm>
#include <string>

#include "tests/server/job/passes_fixture.h"

namespace shardd {
namespace {

SpecBuilder TrainersWrite() {
  SpecBuilder builder(2);
  builder.config().set_trainers_never_write(false);
  builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
  builder.config().mutable_optimizer()->set_trainer_states(1);
  builder.Param(0, "w", {64});
  return builder;
}

class FinishTest : public PassesTest {
 protected:
  FinishTest() : PassesTest(TrainersWrite()) {}

  void Enter(int rank, bool stepped = false) {
    v1::Command command;
    command.mutable_enter_pass()->set_stepped(stepped);
    Send(rank, command);
  }
  void EnterBoth(bool stepped = false) {
    const uint64_t before = Word(0, &DaemonPage::passes);
    Enter(0, stepped);
    Enter(1, stepped);
    ASSERT_TRUE(Until([&] { return Word(0, &DaemonPage::passes) > before && Word(1, &DaemonPage::passes) > before; }));
  }
  void Finish(int rank) {
    OnLoop([&] { job_->Detach(rank, /*finished=*/true); });
  }
  // A step of an optimizer in the trainers; returns when the pass that commits it has begun.
  void StepTo(float value) {
    std::fill_n(SlabAt<float>(job_->memory().shards(), 0), 64, value);
    EnterBoth(/*stepped=*/true);
  }
  absl::Time BehindTheLimit() const {
    return MonotonicNow() + absl::Milliseconds(plan_->config.silence_timeout_ms()) + absl::Seconds(1);
  }
  int Aborts(int rank) { return streams_[rank]->Count(v1::SessionEvent::kAborted); }
};

TEST_F(FinishTest, BeforeAnotherLeavesTheLastCommittedPassCostsNothing) {
  StepTo(5);
  Leave(0);
  Finish(0);
  EXPECT_EQ(streams_[0]->Count(v1::SessionEvent::kDetached), 1);
  ASSERT_EQ(Aborts(1), 0) << streams_[1]->Aborted().message();
  Leave(1);
  OnLoop([&] { EXPECT_FALSE(job_->nodes().finished()); });
  Finish(1);
  OnLoop([&] { EXPECT_TRUE(job_->nodes().finished()); });
  EXPECT_EQ(Aborts(1), 0);
  EXPECT_EQ(epoch(), 1u);
  EXPECT_EQ(committed(), 1);
  EXPECT_EQ(value(), 5.0f);
}

TEST_F(FinishTest, LeavesOthersTheirForwardAndFailsTheirBackwardByName) {
  EnterBoth();
  Leave(0);
  Finish(0);
  v1::Command command;
  command.mutable_unshard()->set_phase(v1::PHASE_FORWARD);
  Send(1, command);
  command.mutable_reshard()->set_group(0);
  Send(1, command);
  ASSERT_EQ(Aborts(1), 0) << streams_[1]->Aborted().message();
  Backward(1);
  ASSERT_EQ(Aborts(1), 1);
  EXPECT_NE(streams_[1]->Aborted().message().find("rank 0 has finished"), std::string::npos);
}

TEST_F(FinishTest, EndsTheWaitOfWhoEntersAnotherPassAtOnce) {
  EnterBoth();
  Leave(0);
  Leave(1);
  Enter(1);
  Finish(0);
  ASSERT_EQ(Aborts(1), 1) << "that pass would never begin";
  EXPECT_NE(streams_[1]->Aborted().message().find("finished while others were in a step (rank=0"), std::string::npos);
}

TEST_F(FinishTest, ASuccessorMeetsTheOthersInTheNextPass) {
  EnterBoth();
  Leave(0);
  Finish(0);
  Attach(0);
  Enter(0);
  OnLoop([&] { EXPECT_EQ(Word(0, &DaemonPage::passes), 0u) << "rank 1 is in the one before"; });
  Leave(1);
  Enter(1);
  ASSERT_TRUE(Until([&] { return Word(0, &DaemonPage::passes) == 1; }));
  Backward(0);
  Backward(1);
  EXPECT_EQ(Aborts(0) + Aborts(1), 0);
  EXPECT_EQ(epoch(), 1u);
}

// Nobody is left who waits for it.
TEST_F(FinishTest, LeavesTheLastRankTheTimeThatItWants) {
  StepTo(5);
  Leave(0);
  Finish(0);
  OnLoop([&] { job_->CheckSilence(BehindTheLimit()); });
  ASSERT_EQ(Aborts(1), 0) << streams_[1]->Aborted().message();
  Leave(1);
  Finish(1);
  OnLoop([&] { EXPECT_TRUE(job_->nodes().finished()); });
  EXPECT_EQ(epoch(), 1u);
}

// Whether it asks before or behind the other's end.
TEST_F(FinishTest, LeavesOthersWhatTheyReadOfFullParameters) {
  v1::Command command;
  command.mutable_enter_full_params();
  for (const bool asks_first : {true, false}) {
    SCOPED_TRACE(asks_first);
    if (asks_first) Send(1, command);
    Finish(0);
    if (!asks_first) Send(1, command);
    ASSERT_EQ(Aborts(1), 0) << streams_[1]->Aborted().message();
    ASSERT_TRUE(Until([&] { return Word(1, &DaemonPage::full_params) == (asks_first ? 1u : 2u); }));
    v1::Command leave;
    leave.mutable_leave_full_params();
    Send(1, leave);
    Attach(0);
  }
  EXPECT_EQ(epoch(), 1u);
}

TEST_F(FinishTest, EndsTheWaitOfWhoWritesFullParameters) {
  v1::Command command;
  command.mutable_enter_full_params()->set_writeback(true);
  Send(1, command);
  Finish(0);
  ASSERT_EQ(Aborts(1), 1);
  EXPECT_NE(streams_[1]->Aborted().message().find("finished while others were in a step (rank=0"), std::string::npos);
}

// A rank that has finished and is kept for its gradients.
class HeldTest : public JobCoreTest {};

TEST_F(HeldTest, IsDroppedForItsSuccessorWithWhatItGave) {
  Backward(0);
  OnLoop([&] { job_->Detach(0, /*finished=*/true); });
  OnLoop([&] { ASSERT_NE(job_->sessions()[0].get(), nullptr) << "rank 1 still needs its gradients"; });
  OnLoop([&] { job_->SessionLost(0, "its process ended"); });
  EXPECT_EQ(epoch(), 1u);
  OnLoop([&] { job_->SessionLost(0, "its process ended", /*replaced=*/true); });
  EXPECT_EQ(epoch(), 2u);
  EXPECT_NE(streams_[1]->Aborted().message().find("rank 0 was replaced"), std::string::npos);
  ASSERT_NO_FATAL_FAILURE(AttachAllAndTrainAStep());
  EXPECT_EQ(value(), -0.5f) << "one gradient of each rank";
}

// Its last step is not committed before the other has stepped, and its program waits for that.
TEST_F(HeldTest, WhoHasSteppedWaitsForASilentRankWithinLimits) {
  Train(0);
  OnLoop([&] { job_->Detach(0, /*finished=*/true); });
  const absl::Duration limit = absl::Milliseconds(plan_->config.silence_timeout_ms());
  OnLoop([&] { job_->CheckSilence(MonotonicNow() + limit - absl::Seconds(1)); });
  EXPECT_EQ(epoch(), 1u);
  OnLoop([&] { job_->CheckSilence(MonotonicNow() + limit + absl::Seconds(1)); });
  EXPECT_EQ(epoch(), 2u);
  EXPECT_NE(streams_[1]->Aborted().message().find("rank 0 waits for rank 1"), std::string::npos)
      << streams_[1]->Aborted().message();
}

TEST_F(HeldTest, WhoHasSteppedIsNotDropped) {
  Train(0);
  OnLoop([&] { job_->Detach(0, /*finished=*/true); });
  OnLoop([&] { job_->SessionLost(0, "it was replaced", /*replaced=*/true); });
  Train(1);
  ASSERT_TRUE(Until([&] { return job_->view().committed_step() == 1; }));
  EXPECT_EQ(epoch(), 1u);
}

}  // namespace
}  // namespace shardd
