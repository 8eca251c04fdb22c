// What happens around a decided step: whatever dies or leaves between the decision and the commit, the step completes
// first.

#include <unistd.h>

#include "tests/server/job/job_core_fixture.h"
#include "tests/server/job/trainer_process.h"

namespace shardd {
namespace {

TEST_F(JobCoreTest, ADeathAfterTheDecisionChangesNothingOfTheStep) {
  TrainUntilDecided();
  const uint64_t before = epoch();
  OnLoop([&] { job_->SessionLost(0, "its process ended"); });
  EXPECT_EQ(epoch(), before) << "the abort waits";
  EXPECT_EQ(committed(), 0);
  Release();
  ASSERT_TRUE(Until([&] { return job_->committed().epoch() == before + 1; }));
  EXPECT_EQ(committed(), 1);
  EXPECT_EQ(value(), -0.5f);
  EXPECT_EQ(streams_[1]->Count(v1::SessionEvent::kCommitted), 1);
  ASSERT_EQ(streams_[1]->Count(v1::SessionEvent::kAborted), 1);
  EXPECT_EQ(streams_[1]->Aborted().committed_step(), 1) << "commit first, then the abort";
  EXPECT_EQ(streams_[1]->Aborted().trainer_state(), "state of rank 1");
  EXPECT_EQ(streams_[1]->Aborted().lost_ranks_size(), 1);
}

TEST_F(JobCoreTest, AnEndBehindTheStepShowsItBeforeAnotherBegins) {
  const DaemonPage* const page = [&] {
    const DaemonPage* of = nullptr;
    OnLoop([&] { of = job_->sessions()[0].get()->memory()->daemon_page->At<DaemonPage>(0); });
    return of;
  }();
  Train(0);
  OnLoop([&] { EXPECT_TRUE(job_->EndBehindStep(absl::AbortedError("the daemon stops"))); });
  EXPECT_EQ(epoch(), 1u) << "rank 1 has not stepped";
  for (const auto& device : devices_) device->Hold();
  Train(1);
  ASSERT_TRUE(testing::PollUntil([&] { return devices_[0]->Waiting() && devices_[1]->Waiting(); }, kPatience));
  EXPECT_EQ(TimelineSequence(page->version.load()), 1u);
  Release();
  ASSERT_TRUE(Until([&] { return job_->sessions().attached() == 0; }));
  EXPECT_EQ(committed(), 1);
  EXPECT_EQ(value(), -0.5f);
  for (const auto& stream : streams_) {
    EXPECT_EQ(stream->Count(v1::SessionEvent::kCommitted), 1);
    EXPECT_TRUE(stream->Aborted().behind_commit());
    EXPECT_EQ(stream->Aborted().committed_step(), 1);
  }
}

TEST_F(JobCoreTest, AnEndBehindTheStepIsRefusedIfNoneComes) {
  OnLoop([&] {
    job_->Detach(0, /*finished=*/false);
    EXPECT_FALSE(job_->EndBehindStep(absl::AbortedError("the daemon stops"))) << "rank 0 is not attached";
  });
}

TEST_F(JobCoreTest, OneInAForwardIsNotIdle) {
  v1::Command command;
  command.mutable_unshard()->set_phase(v1::PHASE_FORWARD);
  Send(0, command);
  OnLoop([&] { job_->EndIfIdle(absl::AbortedError("the daemon stops"), absl::ZeroDuration()); });
  EXPECT_EQ(epoch(), 1u);
}

TEST_F(JobCoreTest, AnIdleJobEndsItsEpochBehindItsLastCommit) {
  OnLoop([&] { job_->EndIfIdle(absl::AbortedError("the daemon stops"), absl::Hours(1)); });
  EXPECT_EQ(epoch(), 1u) << "it has said something within the hour";
  OnLoop([&] { job_->EndIfIdle(absl::AbortedError("the daemon stops"), absl::ZeroDuration()); });
  EXPECT_EQ(epoch(), 2u);
  EXPECT_TRUE(streams_[0]->Aborted().behind_commit());
}

TEST_F(JobCoreTest, BothRanksThatDieAfterTheDecisionAreNamedOnce) {
  TrainUntilDecided();
  OnLoop([&] {
    job_->SessionLost(0, "its process ended");
    job_->SessionLost(0, "its session stream ended");
    job_->SessionLost(1, "its process ended");
  });
  Release();
  ASSERT_TRUE(Until([&] { return job_->sessions().attached() == 0; }));
  EXPECT_EQ(committed(), 1);
  EXPECT_EQ(streams_[0]->Aborted().lost_ranks_size(), 2);
}

// As with a collective that a rank has done its part of.
TEST_F(JobCoreTest, AFinishedRanksBackwardStaysButNoStepCommits) {
  Backward(0);
  OnLoop([&] { job_->Detach(0, /*finished=*/true); });
  OnLoop([&] { EXPECT_NE(job_->sessions()[0].get(), nullptr) << "rank 1 needs its gradients"; });
  Backward(1);
  ASSERT_TRUE(Until([&] { return job_->sessions()[0].get() == nullptr; }));
  EXPECT_EQ(streams_[0]->Count(v1::SessionEvent::kDetached), 1);
  EXPECT_EQ(streams_[1]->Count(v1::SessionEvent::kAborted), 0);
  EXPECT_EQ(SlabAt<float>(job_->memory().gradients(), 0)[0], 1.0f) << "the mean of both";
  Step(1);
  ASSERT_EQ(streams_[1]->Count(v1::SessionEvent::kAborted), 1);
  EXPECT_NE(streams_[1]->Aborted().message().find("rank 0 has finished"), std::string::npos);
}

TEST_F(JobCoreTest, FinishingDuringALaterBackwardOfAnotherEndsTheStep) {
  Backward(0);
  Backward(1);
  ASSERT_TRUE(Until([&] {
    const DaemonPageView page(job_->sessions()[0].get()->memory()->daemon_page->data(),
                              static_cast<int64_t>(plan_->gradient_slots.size()),
                              static_cast<int64_t>(plan_->groups.size()));
    return TimelineSequence(page.slot(0).released.load()) == 1;
  })) << "the slot is free";
  v1::Command command;
  command.mutable_unshard()->set_phase(v1::PHASE_BACKWARD);
  Send(0, command);
  command.mutable_submit_gradients()->set_group(0);
  Send(0, command);
  ASSERT_EQ(streams_[0]->Count(v1::SessionEvent::kAborted), 0);
  OnLoop([&] { job_->Detach(1, /*finished=*/true); });
  ASSERT_EQ(streams_[0]->Count(v1::SessionEvent::kAborted), 1) << "nobody will add to that backward";
  EXPECT_NE(streams_[0]->Aborted().message().find("finished"), std::string::npos);
}

TEST_F(JobCoreTest, ARankThatReturnsInAStepBeginsItAnew) {
  Backward(0);
  Backward(1);
  OnLoop([&] { job_->Detach(0, /*finished=*/true); });
  ASSERT_TRUE(Until([&] { return job_->sessions()[0].get() == nullptr; }));
  const uint64_t before = epoch();
  auto session = Session::Create(plan_, 77, 0, before);
  if (session.ok()) (*session)->peer.pid = getpid();
  ASSERT_TRUE(session.ok());
  OnLoop([&] { EXPECT_EQ(job_->AddSession(*std::move(session)).code(), absl::StatusCode::kAborted); });
  EXPECT_EQ(epoch(), before + 1);
  ASSERT_NO_FATAL_FAILURE(AttachAllAndTrainAStep());
}

TEST_F(JobCoreTest, RanksThatDetachAfterTheirStepLeaveWithTheCommit) {
  TrainUntilDecided();
  const uint64_t before = epoch();
  OnLoop([&] { job_->Detach(0, /*finished=*/true); });
  EXPECT_EQ(streams_[0]->Count(v1::SessionEvent::kDetached), 0);
  OnLoop([&] { job_->SessionLost(0, "its process ended"); });  // it need not wait for the answer
  Release();
  ASSERT_TRUE(Until([&] { return job_->sessions()[0].get() == nullptr; }));
  EXPECT_EQ(committed(), 1);
  EXPECT_EQ(epoch(), before) << "nobody else is troubled";
}

TEST_F(JobCoreTest, AnEpochThatEndsBetweenStepsIsNoAbort) {
  const auto aborts = [this] {
    v1::Job job;
    OnLoop([&] { job_->view().Describe(&job).Complete(&job); });
    return job.counters().aborts();
  };
  Train(0);
  Train(1);
  ASSERT_TRUE(Until([&] { return job_->view().committed_step() == 1; }));
  const uint64_t before = epoch();
  OnLoop([&] { job_->SessionLost(1, "its process ended"); });
  EXPECT_EQ(epoch(), before + 1);
  EXPECT_EQ(aborts(), 0u);
  Attach(0);
  Attach(1);
  Backward(0);
  OnLoop([&] { job_->SessionLost(1, "its process ended"); });
  EXPECT_EQ(epoch(), before + 2);
  EXPECT_EQ(aborts(), 1u) << "the backward was in vain";
}

TEST_F(JobCoreTest, CommandsDuringTheCommitFailAfterIt) {
  TrainUntilDecided();
  v1::Command command;
  command.mutable_submit_gradients()->set_group(0);
  Send(1, command);
  EXPECT_EQ(streams_[1]->Count(v1::SessionEvent::kAborted), 0);
  OnLoop([&] { EXPECT_TRUE(job_->sessions()[1].get()->broken) << "nothing is read from it any more"; });
  Release();
  ASSERT_TRUE(Until([&] { return job_->sessions().attached() == 0; }));
  EXPECT_EQ(committed(), 1);
  EXPECT_NE(streams_[1]->Aborted().message().find("the step is being committed"), std::string::npos);
}

TEST_F(JobCoreTest, RankThatDiesBeforeTheDecisionDropsTheStep) {
  Train(0);
  OnLoop([&] { job_->SessionLost(1, "its process ended"); });
  EXPECT_EQ(committed(), 0);
  EXPECT_EQ(value(), 0.0f);
  ASSERT_NO_FATAL_FAILURE(AttachAllAndTrainAStep());
  EXPECT_EQ(value(), -0.5f) << "the dropped gradient took no part";
}

TEST_F(JobCoreTest, AFailedUpdateEndsTheJobAndSaysWhy) {
  TrainUntilDecided();
  Release(absl::CancelledError("the device is shutting down"));
  ASSERT_TRUE(Until([&] { return job_->closed(); }));
  EXPECT_EQ(streams_[0]->Aborted().code(), static_cast<int>(absl::StatusCode::kNotFound));
  EXPECT_NE(streams_[0]->Aborted().message().find("the device is shutting down"), std::string::npos);
}

TEST_F(JobCoreTest, ClientsHearWhomTheyAwaitAndWhetherItIsAttached) {
  Train(0);
  OnLoop([&] { job_->Detach(1, /*finished=*/false); });  // aborts: everybody attaches anew
  Attach(0);
  Train(0);
  OnLoop([&] { job_->CheckSilence(MonotonicNow() + absl::Seconds(1)); });
  ASSERT_EQ(streams_[0]->Count(v1::SessionEvent::kWaiting), 1);
  OnLoop([&] { job_->CheckSilence(MonotonicNow() + absl::Seconds(2)); });
  EXPECT_EQ(streams_[0]->Count(v1::SessionEvent::kWaiting), 1) << "told once";
  v1::ListRanksResponse ranks;
  OnLoop([&] { job_->view().DescribeRanks(&ranks); });
  EXPECT_NE(ranks.ranks(0).waiting_for().find("rank 1: SubmitGradients"), std::string::npos);
  EXPECT_NE(ranks.ranks(0).waiting_for().find("not attached"), std::string::npos);
}

TEST_F(JobCoreTest, ProcessOfASessionIsWatchedOnceItsPidfdCame) {
  TrainerProcess process;
  SetProcess(0, process.pid(), process.Descriptor());
  process.End();
  EXPECT_TRUE(Until([&] { return job_->sessions()[0].get() == nullptr; }));
}

}  // namespace
}  // namespace shardd
