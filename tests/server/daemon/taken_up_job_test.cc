// What is read of a job that another daemon has left, where a record is whole and says what cannot be.

#include "server/daemon/take_up/taken_up_job.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

v1::JobSpec Spec() {
  SpecBuilder builder(/*world_size=*/1);
  builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  builder.Param(0, "weight", {1000});
  return builder.spec();
}

class TakenUpJobTest : public ::testing::Test {
 protected:
  TakenUpJobTest() : plan_(*PlanShards(Spec())), sizes_(TakeUpLog::SizesFor(plan_)) {
    decided_.set_epoch(1);
    decided_.set_step(5);
    decided_.add_groups()->set_lr(0.1);
    decided_.set_clip_factor(1);
    decided_.set_present("\x1");
    decided_.add_step_counts(4);
    decided_.add_trainer_states("state");
  }
  // Of a daemon that was killed behind the decision, and after `last`.
  absl::StatusOr<TakenUpJob> TakeUp(const std::function<void(TakeUpLog&)>& last = [](TakeUpLog&) {}) const {
    JobMemory::Kept kept;
    const auto put = [&kept](const std::string& name, int fd) {
      kept[name] = UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0));
      return absl::OkStatus();
    };
    const std::unique_ptr<JobMemory> memory = *JobMemory::Create(plan_, "job");
    const std::unique_ptr<Journal> journal = *Journal::Create(sizes_.place_bytes);
    const std::unique_ptr<TakeUpLog> log = *TakeUpLog::Create(sizes_);
    EXPECT_TRUE(memory->KeepBy(put).ok());
    EXPECT_TRUE(journal->WriteDecided(decided_).ok());
    v1::CommittedRecord facts;
    facts.add_step_counts(4);
    facts.add_trainer_states("before");
    EXPECT_TRUE(log->Commit(facts, {1, 4, 9}).ok());
    last(*log);
    v1::CustodyJob job;
    job.set_format(1);
    *job.mutable_spec() = Spec();
    job.set_plan_digest(plan_.digest);
    const std::unique_ptr<Slab> record = *MakeCustodyRecord(kCustodyJobName, job);
    EXPECT_TRUE(put(kCustodyJobName, record->fd()).ok());
    EXPECT_TRUE(put(kCustodyJournalName, journal->fd()).ok());
    EXPECT_TRUE(put(kCustodyLogName, log->fd()).ok());
    return ReadTakenUpJob(std::move(kept), {{}, [](int) { return SlabPlace(); }});
  }
  void ExpectDamaged(const absl::StatusOr<TakenUpJob>& job, const std::string& text) {
    EXPECT_EQ(job.status().code(), absl::StatusCode::kDataLoss) << job.status();
    EXPECT_TRUE(absl::StrContains(job.status().message(), text)) << job.status();
  }

  const ShardPlan plan_;
  const TakeUpLog::Sizes sizes_;
  v1::DecidedStepRecord decided_;
};

TEST_F(TakenUpJobTest, ADecidedStepIsCompleted) {
  const absl::StatusOr<TakenUpJob> job = TakeUp();
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->committed.step, 5);
  EXPECT_EQ(job->committed.version, 10u);
  EXPECT_EQ(job->committed.step_counts[0], 5);
  EXPECT_EQ(job->committed.trainer_states[0], "state");
}

TEST_F(TakenUpJobTest, ARecordOfAnotherPlanCompletesNothing) {
  decided_.add_step_counts(4);
  ExpectDamaged(TakeUp(), "the record of step 5 is of another plan");
  decided_.mutable_step_counts()->RemoveLast();
  decided_.add_groups();
  ExpectDamaged(TakeUp(), "the record of step 5 is of another plan");
  decided_.clear_groups();
  ExpectDamaged(TakeUp(), "the record of step 5 is of another plan");
}

TEST_F(TakenUpJobTest, TornBlocksThatAreTooLargeAreNotPutBack) {
  for (const int64_t numel : {int64_t{0}, int64_t{-1}, UpdateLog::kBlockNumel + 1}) {
    ExpectDamaged(TakeUp([&](TakeUpLog& log) {
                    log.update(0).Begin(5);
                    log.update(0).Begun(0, numel);
                  }),
                  "is torn has");
  }
}

TEST_F(TakenUpJobTest, AStepThatIsNoneIsNoHeader) {
  for (const int64_t step : {int64_t{-3}, std::numeric_limits<int64_t>::max()}) {
    ExpectDamaged(TakeUp([&](TakeUpLog& log) { log.CommitStep({1, step, 9}); }), "no header is valid");
  }
}

}  // namespace
}  // namespace shardd
