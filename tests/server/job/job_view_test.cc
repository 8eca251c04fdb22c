#include "server/job/job_view.h"

#include "server/collective/collective.h"
#include "server/job/epoch_end.h"
#include "server/job/full_params/summons.h"
#include "server/job/job_events.h"
#include "server/job/membership/absent_ranks.h"
#include "server/job/nodes/job_nodes.h"
#include "server/job/unshard/unsharding.h"
#include "server/job/work/given_back.h"
#include "server/job/work/optimizer_devices.h"
#include "server/job/writes/snapshot_keeper.h"
#include "server/job/writes/value_writes.h"
#include "server/job/writes/write_undo.h"
#include "server/observe/events.h"
#include "server/storage/job_memory.h"
#include "tests/server/job/summons_fixture.h"
#include "tests/server/job/writes/kept_work.h"

namespace shardd {
namespace {

class OneCollective final : public Collective {
 public:
  const char* name() const override { return "one"; }
  std::string Describe() const override { return "one of the test"; }
  void ReduceScatter(ReduceScatterRequest, Done) override {}
  void AllGather(AllGatherRequest, Done) override {}
};

class JobViewTest : public SummonsFactsTest {
 protected:
  JobViewTest()
      : identity_{7, Tenant{}, {}, plan_, absl::Now(), std::nullopt, {}}, memory_(*JobMemory::Create(*plan_, "job")) {
    spec_.set_name("job");
    identity_.spec = spec_;
    devices_ = {&device_, &device_};
    values_ =
        std::make_unique<ValueWrites>(ValueWrites::Facts{plan_.get(), &decision_, &summons_, &extensions_, &sessions_},
                                      ValueWrites::Services{memory_.get(), &committed_, &pairing_.presence(),
                                                            /*commits=*/nullptr, &events_, &work_, &job_},
                                      /*copier=*/nullptr, WorkOwner{});
    unsharding_ = std::make_unique<Unsharding>(
        plan_, Unsharding::Facts{&committed_, &decision_, &steps_, &writes_, &sessions_, memory_.get()},
        Unsharding::Services{&collective_, &given_back_, &work_, &events_, &counters_, &job_});
    view_ = MakeView(&committed_);
  }
  std::unique_ptr<JobView> MakeView(const Committed* committed) {
    return std::make_unique<JobView>(
        JobView::Facts{&identity_, memory_.get(), &devices_,   &collective_,  committed,
                       &counters_, &pairing_,     &sessions_,  values_.get(), &summons_,
                       &absent_,   &writes_,      &leavers_,   &steps_,       unsharding_.get(),
                       &decision_, &nodes_,       &snapshots_, &end_,         [this](int) { return wait_; }});
  }
  v1::Job Job() const {
    v1::Job job;
    (void)view_->Describe(&job);
    return job;
  }
  v1::Rank Rank(int rank) const {
    v1::ListRanksResponse ranks;
    view_->DescribeRanks(&ranks);
    return ranks.ranks(rank);
  }

  JobIdentity identity_;
  const std::unique_ptr<JobMemory> memory_;
  KeptWork device_;
  OneCollective collective_;
  v1::Counters counters_;
  SnapshotKeeper snapshots_{{plan_.get(), nullptr, &decision_, &sessions_, &writes_, nullptr}, {}, /*uid=*/0};
  AbsentRanks absent_{"job", {&sessions_, &leavers_}, &events_};
  JobNodes nodes_{/*parts=*/nullptr, {plan_, nullptr, &decision_, &steps_, &leavers_, nullptr}, {&committed_}, {}};
  EpochEnd end_{/*commits=*/nullptr, /*nodes=*/nullptr};
  Wait wait_;  // of every rank
  std::unique_ptr<ValueWrites> values_;
  std::unique_ptr<Unsharding> unsharding_;
  std::unique_ptr<JobView> view_;
};

TEST_F(JobViewTest, TheStateFollowsWhatRanksAndVersionsDo) {
  EXPECT_EQ(Job().state(), v1::JOB_STATE_WAITING);
  Attach(0);
  Attach(1);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_IDLE);
  Submit(0);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_FORWARD_BACKWARD);
  decision_.BeginCommit();
  EXPECT_EQ(Job().state(), v1::JOB_STATE_COMMITTING);
  end_.Close();
  EXPECT_EQ(Job().state(), v1::JOB_STATE_CLOSED);
}

TEST_F(JobViewTest, AJobIsDescribedByWhatItsComponentsSay) {
  counters_.set_commits(3);
  Attach(1);
  const v1::Job job = Job();
  EXPECT_EQ(job.name(), "job");
  EXPECT_EQ(job.job_id(), 7u);
  EXPECT_EQ(job.world_size(), 2);
  EXPECT_EQ(job.version(), 1u);
  EXPECT_EQ(job.attached_ranks(), 1);
  EXPECT_EQ(job.counters().commits(), 3u);
  EXPECT_EQ(job.collective(), "one of the test");
  EXPECT_EQ(job.nodes_size(), 0);
}

TEST_F(JobViewTest, RanksWithoutASessionAreAbsentOrHaveFinished) {
  leavers_.Left(1, /*finished=*/true);
  EXPECT_EQ(Rank(0).state(), v1::RANK_STATE_ABSENT);
  EXPECT_EQ(Rank(1).state(), v1::RANK_STATE_FINISHED);
  Attach(0);
  EXPECT_EQ(Rank(0).state(), v1::RANK_STATE_ATTACHING);
  EXPECT_EQ(Rank(0).device(), "kept");
  EXPECT_EQ(Rank(0).handles_size(), static_cast<int>(plan_->groups.size()));
}

TEST_F(JobViewTest, WaitsShowWhatIsKnownOfTheAwaitedRank) {
  Attach(0);
  EXPECT_EQ(view_->WaitText(0), "");
  wait_ = {1, "Step"};
  EXPECT_EQ(view_->WaitText(0), "rank 1: Step (it is not attached)");
  absent_.Answered(1, absl::InvalidArgumentError("another plan"), /*ticks=*/1, MonotonicNow());
  EXPECT_EQ(view_->WaitText(0), "rank 1: Step (rank 1 was refused: another plan)");
  Attach(1);
  absent_.Came(1);
  EXPECT_EQ(view_->WaitText(0), "rank 1: Step");
  sessions_[0]->held = true;
  EXPECT_EQ(view_->WaitText(0), "kept: values are copied");
}

TEST_F(JobViewTest, ARankThatHasBegunSomethingIsMidStep) {
  Attach(0);
  Attach(1);
  EXPECT_FALSE(view_->IsMidStep());
  CloseBackward(0);
  EXPECT_TRUE(view_->IsMidStep());
}

TEST_F(JobViewTest, AReturningRankFindsItsParametersOrLearnsTheirLoss) {
  Attach(0);
  Session& session = *sessions_[0];
  session.expected_version = 3;
  EXPECT_TRUE(view_->CheckStillHas(session).ok());
  const Committed fresh("job", 2, 2, NewJournal());
  view_ = MakeView(&fresh);
  EXPECT_FALSE(view_->has_parameters());
  const absl::Status lost = view_->CheckStillHas(session);
  EXPECT_EQ(lost.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(lost.message(), ::testing::HasSubstr("its parameters are lost (got version 0, want 3 or later)"));
  session.expected_version = 0;
  EXPECT_TRUE(view_->CheckStillHas(session).ok());
}

}  // namespace
}  // namespace shardd
