// What is read of a job that another daemon has left, where a record is whole and says what cannot be.

#include "server/daemon/take_up/taken_up_job.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "server/storage/job_slab.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

v1::JobSpec Spec() {
  SpecBuilder builder(/*world_size=*/1);
  builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  builder.Param(0, "weight", {1000});
  return builder.spec();
}

// What a daemon that was killed has left with the custodian of its job, and what the next one makes of it.
class LeftJob {
 public:
  LeftJob(v1::JobSpec spec, const ShardPlan& plan, int format = TakeUpLog::kInCopies)
      : spec_(std::move(spec)),
        plan_(plan),
        memory_(*JobMemory::Create(plan, "job")),
        journal_(*Journal::Create(TakeUpLog::SizesFor(plan).place_bytes)),
        log_(*TakeUpLog::Create(TakeUpLog::SizesFor(plan), format)) {}
  JobMemory& memory() { return *memory_; }
  Journal& journal() { return *journal_; }
  TakeUpLog& log() { return *log_; }
  absl::StatusOr<TakenUpJob> TakeUp() {
    JobMemory::Kept kept;
    const auto put = [&kept](const std::string& name, int fd) {
      kept[name] = UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0));
      return absl::OkStatus();
    };
    v1::CustodyJob job;
    job.set_format(1);
    *job.mutable_spec() = spec_;
    job.set_plan_digest(plan_.digest);
    const std::unique_ptr<Slab> record = *MakeCustodyRecord(kCustodyJobName, job);
    EXPECT_TRUE(memory_->KeepBy(put).ok());
    EXPECT_TRUE(put(kCustodyJobName, record->fd()).ok());
    EXPECT_TRUE(put(kCustodyJournalName, journal_->fd()).ok());
    EXPECT_TRUE(put(kCustodyLogName, log_->fd()).ok());
    return ReadTakenUpJob(std::move(kept), {{}, [](int) { return SlabPlace(); }});
  }

 private:
  const v1::JobSpec spec_;
  const ShardPlan& plan_;
  const std::unique_ptr<JobMemory> memory_;
  const std::unique_ptr<Journal> journal_;
  const std::unique_ptr<TakeUpLog> log_;
};

class TakenUpJobTest : public ::testing::Test {
 protected:
  TakenUpJobTest() : plan_(*PlanShards(Spec())) {
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
    LeftJob left(Spec(), plan_);
    EXPECT_TRUE(left.journal().WriteDecided(decided_).ok());
    v1::CommittedRecord facts;
    facts.add_step_counts(4);
    facts.add_trainer_states("before");
    EXPECT_TRUE(left.log().Commit(facts, {1, 4, 9}).ok());
    last(left.log());
    return left.TakeUp();
  }
  void ExpectDamaged(const absl::StatusOr<TakenUpJob>& job, const std::string& text) {
    EXPECT_EQ(job.status().code(), absl::StatusCode::kDataLoss) << job.status();
    EXPECT_TRUE(absl::StrContains(job.status().message(), text)) << job.status();
  }

  const ShardPlan plan_;
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

// Others may have made that version in another attempt, without this node.
TEST_F(TakenUpJobTest, ItIsKnownInWhichAttemptTheVersionWasMade) {
  decided_.set_generation(70);
  absl::StatusOr<TakenUpJob> job = TakeUp();
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->committed.generation, 70u) << "of the step that is completed";
  v1::CommittedRecord values;
  values.add_step_counts(4);
  values.add_trainer_states("before");
  values.set_generation(60);
  decided_.set_step(9);
  job = TakeUp([&](TakeUpLog& log) { EXPECT_TRUE(log.Commit(values, {2, 4, 10}).ok()); });
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->committed.generation, 60u) << "of values";
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

// Of trainers with their own optimizer, whose daemon was killed while it took a snapshot, or behind that. Each slab has
// one value, and the snapshot one of its own for its shards.
class LeftSnapshotTest : public ::testing::Test {
 protected:
  static constexpr float kStored = 1, kRead = 2, kState = 3, kOwnShards = 4, kOwnState = 5;
  static constexpr int kNumel = 3000;
  static v1::JobSpec SpecOfTrainers() {
    v1::JobSpec spec = Spec();
    spec.mutable_config()->set_trainers_never_write(false);
    spec.mutable_config()->mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
    spec.mutable_config()->mutable_optimizer()->set_trainer_states(1);
    spec.mutable_tree()->mutable_modules(0)->mutable_parameters(0)->set_shape(0, kNumel);
    return spec;
  }
  static void Fill(const JobSlab* slab, int64_t offset_bytes, float value) {
    std::fill_n(reinterpret_cast<float*>(slab->At(offset_bytes)), kNumel, value);
  }
  // The one value that is there.
  static float ValueOf(const JobSlab* slab, int64_t offset_bytes = 0) {
    const auto* const values = reinterpret_cast<const float*>(slab->At(offset_bytes));
    EXPECT_EQ(std::count(values, values + kNumel, values[0]), kNumel);
    return values[0];
  }
  void TakeUp(const std::function<void(TakeUpLog&)>& last, int format = TakeUpLog::kInCopies) {
    LeftJob left(SpecOfTrainers(), plan_, format);
    JobMemory& memory = left.memory();
    unused_bytes_ = memory.kept()->size_bytes() - memory.kept()->allocated_bytes();
    Fill(memory.shards(), 0, kStored);
    Fill(memory.parameters(), 0, kRead);
    Fill(memory.optimizer(), 0, kState);
    Fill(memory.kept(), 0, kOwnShards);
    Fill(memory.kept(), plan_.memory.shards_bytes, kOwnState);
    v1::CommittedRecord facts;
    facts.add_step_counts(0);
    facts.add_trainer_states("state");
    EXPECT_TRUE(left.log().Commit(facts, {1, 4, 9}, TakeUpLog::Counts::kSnapshotBeingTaken).ok());
    last(left.log());
    absl::StatusOr<TakenUpJob> taken = left.TakeUp();
    ASSERT_TRUE(taken.ok()) << taken.status();
    taken_ = *std::move(taken);
    EXPECT_TRUE(taken_.committed.in_snapshot);
    EXPECT_EQ(taken_.committed.step, 4);
    EXPECT_EQ(taken_.log->Read()->counts, TakeUpLog::Counts::kSnapshot) << "as the one that follows finds it";
    EXPECT_EQ(taken_.log->Read()->shards_in_copies, taken_.committed.shards_in_copies);
  }
  void ExpectOwnShards(float shards, float state) const {
    EXPECT_FALSE(taken_.committed.shards_in_copies);
    EXPECT_EQ(ValueOf(taken_.memory->kept()), shards);
    EXPECT_EQ(ValueOf(taken_.memory->kept(), plan_.memory.shards_bytes), state);
  }
  void ExpectInCopies(float read, float state) const {
    EXPECT_TRUE(taken_.committed.shards_in_copies);
    EXPECT_EQ(ValueOf(taken_.memory->parameters()), read);
    EXPECT_EQ(ValueOf(taken_.memory->kept(), plan_.memory.shards_bytes), state);
  }

  const ShardPlan plan_ = *PlanShards(SpecOfTrainers());
  int64_t unused_bytes_ = 0;  // of the snapshot's slab, as it was made
  TakenUpJob taken_;
};

TEST_F(LeftSnapshotTest, OneInCopiesIsGoneBackToThere) {
  TakeUp([](TakeUpLog& log) { log.SnapshotTaken(/*shards_in_copies=*/true); });
  ExpectInCopies(kRead, kOwnState);
  EXPECT_EQ(unused_bytes_, plan_.memory.shards_bytes / 4096 * 4096);
}

// The devices may have been writing over what passes read.
TEST_F(LeftSnapshotTest, OneThatWasBegunIsMadeOfWhatRanksStored) {
  TakeUp([](TakeUpLog&) {});
  ExpectInCopies(kStored, kState);
}

// Ranks have stored into their shards since.
TEST_F(LeftSnapshotTest, OneBehindAPassIsMadeOfWhatThatReads) {
  TakeUp([](TakeUpLog& log) { log.SnapshotIsBehind(); });
  ExpectInCopies(kRead, kState);
}

// As older daemons leave it; passes may have gone on without it since.
TEST_F(LeftSnapshotTest, OneWithShardsOfItsOwnKeepsThem) {
  TakeUp([](TakeUpLog& log) { log.SnapshotTaken(); });
  ExpectOwnShards(kOwnShards, kOwnState);
}

// That daemon may take it up again.
TEST_F(LeftSnapshotTest, OneOfAnOlderDaemonIsGivenShardsOfItsOwn) {
  TakeUp([](TakeUpLog&) {}, TakeUpLog::kOwnShards);
  ExpectOwnShards(kStored, kState);
  TakeUp([](TakeUpLog& log) { log.SnapshotIsBehind(); }, TakeUpLog::kOwnShards);
  ExpectOwnShards(kRead, kState);
}

}  // namespace
}  // namespace shardd
