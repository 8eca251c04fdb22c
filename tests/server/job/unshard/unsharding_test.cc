#include "server/job/unshard/unsharding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "server/collective/collective.h"
#include "server/job/full_params/full_params.h"
#include "server/job/gradients/pairing.h"
#include "server/job/job_events.h"
#include "server/job/membership/leavers.h"
#include "server/job/membership/sessions.h"
#include "server/job/step/asked_steps.h"
#include "server/job/step/committed.h"
#include "server/job/step/step_decision.h"
#include "server/job/work/given_back.h"
#include "server/job/work/job_work.h"
#include "server/job/writes/trainer_writes.h"
#include "server/loop/core_loop.h"
#include "server/observe/duration_histogram.h"
#include "server/observe/events.h"
#include "server/session/session.h"
#include "server/storage/job_memory.h"
#include "server/storage/journal.h"
#include "server/tenant/tenant.h"
#include "tests/common/plan/spec_builder.h"
#include "tests/server/job/fake_job.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

// Keeps what it is asked for.
class KeptGathers final : public Collective {
 public:
  const char* name() const override { return "kept"; }
  std::string Describe() const override { return "kept"; }
  void ReduceScatter(ReduceScatterRequest, Done) override { FAIL() << "nobody adds"; }
  void AllGather(AllGatherRequest request, Done done) override {
    groups.push_back(request.group);
    ends.push_back(std::move(done));
  }
  std::vector<int> groups;
  std::vector<Done> ends;
};

class UnshardingTest : public ::testing::Test {
 protected:
  UnshardingTest() : UnshardingTest(v1::UNSHARD_MODE_ZERO_COPY, /*strict=*/false) {}
  UnshardingTest(v1::UnshardMode mode, bool strict) : plan_(Plan(mode, strict)) {
    auto memory = JobMemory::Create(*plan_, "job");
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
    auto journal = Journal::Create(/*place_bytes=*/4096);
    EXPECT_TRUE(journal.ok()) << journal.status();
    committed_ = std::make_unique<Committed>("job", 3, 2, *std::move(journal));
    events_ = std::make_unique<JobEvents>("job", Tenant{}, committed_.get(), &log_);
    steps_ = std::make_unique<AskedSteps>(2, committed_.get());
    pairing_ = std::make_unique<Pairing>(plan_, committed_.get());
    writes_ =
        std::make_unique<TrainerWrites>(TrainerWrites::Facts{plan_.get(), committed_.get(), &sessions_, steps_.get(),
                                                             pairing_.get(), &full_params_, nullptr, nullptr},
                                        &counters_);
    unsharding_ = std::make_unique<Unsharding>(
        plan_, Unsharding::Facts{committed_.get(), &decision_, steps_.get(), writes_.get(), &sessions_, memory_.get()},
        Unsharding::Services{&gathers_, &given_back_, &work_, events_.get(), &counters_, &job_});
    for (int rank = 0; rank < 2; ++rank) {
      auto session = Session::Create(plan_, /*id=*/static_cast<uint64_t>(rank) + 1, rank, /*epoch=*/1);
      EXPECT_TRUE(session.ok()) << session.status();
      loop_.RunAndWait([&] { sessions_.Add(*std::move(session)); });
    }
  }
  ~UnshardingTest() override {
    for (const Collective::Done& end : gathers_.ends) end(absl::OkStatus());
    loop_.Stop();
  }
  static std::shared_ptr<const ShardPlan> Plan(v1::UnshardMode mode, bool strict) {
    SpecBuilder builder(2);
    builder.config().set_unshard_mode(mode);
    builder.config().set_trainers_never_write(true);
    builder.config().set_strict_order(strict);
    builder.Param(0, "root", {8});
    for (const char* block : {"a", "b"}) builder.Param(builder.AddSharded(0, block), "w", {8});
    return std::make_shared<const ShardPlan>(builder.Plan());
  }
  absl::Status Unshard(int rank, int group, int64_t phase = v1::PHASE_FORWARD) {
    return unsharding_->Unshard(sessions_[rank].get(), group, phase);
  }
  absl::Status Reshard(int rank, int group) { return unsharding_->Reshard(sessions_[rank].get(), group, /*done=*/0); }
  bool IsUnsharded(int rank, int group) {
    return sessions_[rank]->handles[static_cast<size_t>(group)].storage() == StorageState::kUnsharded;
  }
  void EndGather(size_t number, const absl::Status& status = absl::OkStatus()) {
    std::exchange(gathers_.ends[number], [](const absl::Status&) {})(status);
    loop_.RunAndWait([] {});
  }

  const std::shared_ptr<const ShardPlan> plan_;
  CoreLoop loop_;
  EventLog log_;
  Sessions sessions_{2, &loop_};
  PollTimer timer_{&loop_};
  GivenBack given_back_{&sessions_, &timer_, &loop_};
  FakeJob job_;
  JobWork work_{&loop_, &job_};
  KeptGathers gathers_;
  FullParams full_params_{2};
  StepDecision decision_;
  v1::Counters counters_;
  std::unique_ptr<JobMemory> memory_;
  std::unique_ptr<Committed> committed_;
  std::unique_ptr<JobEvents> events_;
  std::unique_ptr<AskedSteps> steps_;
  std::unique_ptr<Pairing> pairing_;
  std::unique_ptr<TrainerWrites> writes_;
  std::unique_ptr<Unsharding> unsharding_;
};

TEST_F(UnshardingTest, NothingIsUnshardedBeforeTheFirstVersion) {
  EXPECT_THAT(Unshard(0, 1).message(), HasSubstr("the job has no parameters yet"));
  committed_->CommitVersion();
  EXPECT_EQ(Unshard(0, 1, /*phase=*/3).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(Unshard(0, 1).ok());
}

TEST_F(UnshardingTest, WhereParametersLieARequestIsGrantedAtOnce) {
  committed_->CommitVersion();
  ASSERT_TRUE(Unshard(0, 1).ok());
  EXPECT_TRUE(IsUnsharded(0, 1));
  EXPECT_TRUE(gathers_.groups.empty());
  EXPECT_EQ(counters_.unshards(), 1);
  EXPECT_TRUE(Reshard(0, 1).ok());
  EXPECT_FALSE(Reshard(0, 1).ok()) << "it is not unsharded";
}

class PooledUnshardingTest : public UnshardingTest {
 protected:
  PooledUnshardingTest() : UnshardingTest(v1::UNSHARD_MODE_POOLED, /*strict=*/true) { committed_->CommitVersion(); }
};

TEST_F(PooledUnshardingTest, OneGatherServesAllRanksThatAsk) {
  ASSERT_TRUE(Unshard(0, 1).ok() && Unshard(1, 1).ok());
  ASSERT_EQ(gathers_.groups.size(), 1u);
  EXPECT_FALSE(IsUnsharded(0, 1));
  EXPECT_TRUE(unsharding_->AwaitsFill(0));
  EXPECT_EQ(unsharding_->pending_fills(), 1);
  EndGather(0);
  EXPECT_TRUE(IsUnsharded(0, 1) && IsUnsharded(1, 1));
  EXPECT_EQ(unsharding_->pending_fills(), 0);
}

TEST_F(PooledUnshardingTest, RequestsForTheVersionThatIsBeingMadeAreDeferred) {
  decision_.BeginCommit();
  ASSERT_TRUE(Unshard(0, 1).ok());
  EXPECT_TRUE(gathers_.groups.empty());
  decision_.End();
  committed_->CommitVersion();
  unsharding_->VersionCommitted();
  EXPECT_TRUE(unsharding_->MayRetry());
  ASSERT_TRUE(unsharding_->Retry().ok());
  EXPECT_EQ(gathers_.groups.size(), 1u);
}

TEST_F(PooledUnshardingTest, AFailedGatherEndsItsOwnEpochOnly) {
  ASSERT_TRUE(Unshard(0, 1).ok());
  unsharding_->EndEpoch();
  EndGather(0, absl::InternalError("of the epoch before"));
  EXPECT_TRUE(job_.failed.empty());
  ASSERT_TRUE(unsharding_->pending_fills() == 0);
}

TEST_F(PooledUnshardingTest, AFailedGatherIsToldToTheJob) {
  ASSERT_TRUE(Unshard(0, 1).ok());
  EndGather(0, absl::InternalError("the device is lost"));
  EXPECT_EQ(job_.failure().message(), "the device is lost");
  EXPECT_FALSE(IsUnsharded(0, 1));
}

TEST_F(PooledUnshardingTest, AStrictJobRefusesAFirstStepInDifferentOrders) {
  ASSERT_TRUE(unsharding_->GradientsSubmitted(0, 1).ok());
  ASSERT_TRUE(unsharding_->GradientsSubmitted(1, 2).ok());
  unsharding_->EndStep(0);
  unsharding_->EndStep(1);
  EXPECT_THAT(unsharding_->CompareOrders().message(), HasSubstr("strict order"));
  EXPECT_EQ(counters_.departures(), 1);
}

}  // namespace
}  // namespace shardd
