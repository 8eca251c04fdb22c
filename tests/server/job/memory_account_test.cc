#include "server/job/memory_account.h"

#include <gtest/gtest.h>

#include "server/job/membership/gradient_writers.h"
#include "server/storage/job_memory.h"
#include "server/storage/undo_slab.h"
#include "tests/server/job/facts_fixture.h"

namespace shardd {
namespace {

class MemoryAccountTest : public FactsTest {
 protected:
  explicit MemoryAccountTest(bool several = false) {
    if (several) {
      SpecBuilder builder(/*world_size=*/2);
      v1::OptimizerConfig& optimizer = *builder.config().mutable_optimizer();
      optimizer.set_kind(v1::OPTIMIZER_KIND_ADAMW);
      v1::OptimizerConfig::Group& group = *optimizer.add_groups();
      group.set_kind(v1::OPTIMIZER_KIND_MUON);
      group.add_fqns("w");
      builder.Param(0, "w", {1 << 10, 1 << 10});
      plan_of_several_ = std::make_unique<ShardPlan>(builder.Plan());
    }
    const ShardPlan* const plan = several ? plan_of_several_.get() : plan_.get();
    spec_.set_name("job");
    auto memory = JobMemory::Create(*plan, "job");
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
    writers_ = std::make_unique<GradientWriters>(memory_.get());
    account_ = std::make_unique<MemoryAccount>(
        MemoryAccount::Facts{&spec_, plan, memory_.get(), &sessions_, writers_.get(), &snapshot_, &full_params_},
        nullptr);
  }
  std::unique_ptr<ShardPlan> plan_of_several_;
  v1::JobSpec spec_;
  std::unique_ptr<JobMemory> memory_;
  std::unique_ptr<GradientWriters> writers_;
  std::unique_ptr<MemoryAccount> account_;
};

TEST_F(MemoryAccountTest, ASessionThatIsThereIsNotReservedAnyMore) {
  const int64_t before = account_->reserved_bytes();
  Attach(0);
  EXPECT_EQ(account_->reserved_bytes(), before - HostSessionBytes(*plan_, memory_->place()));
}

TEST_F(MemoryAccountTest, ASnapshotThatIsTakenIsNoLongerReserved) {
  const int64_t before = account_->reserved_bytes();
  snapshot_.Taken(1, {"", ""});
  EXPECT_EQ(account_->reserved_bytes(), before - plan_->memory.kept_bytes);
}

// What waits to take a job's place is promised as much as the job that it is to be.
TEST_F(MemoryAccountTest, BeforeAnybodyAttachesAllIsReserved) {
  EXPECT_GT(UnusedHostBytes(*plan_, *memory_), 0);
  EXPECT_EQ(UnusedHostBytes(*plan_, *memory_), account_->reserved_bytes());
}

class MemoryOfSeveralTest : public MemoryAccountTest {
 protected:
  MemoryOfSeveralTest() : MemoryAccountTest(/*several=*/true) {}
};

TEST_F(MemoryOfSeveralTest, OldBytesOfPartsAreReservedBeforeAnybodyAttaches) {
  EXPECT_GT(UnusedHostBytes(*plan_of_several_, *memory_), plan_of_several_->memory.undo_bytes);
  EXPECT_EQ(UnusedHostBytes(*plan_of_several_, *memory_), account_->reserved_bytes());
}

TEST_F(MemoryOfSeveralTest, OldBytesThatAreThereAreNotReservedAnyMore) {
  const int64_t before = account_->reserved_bytes();
  const int64_t saved = int64_t{64} << 10;
  ASSERT_TRUE(memory_->undo()->Save(memory_->shards(), 0, saved, /*version=*/1).ok());
  EXPECT_EQ(account_->reserved_bytes(), before - saved);
  v1::Memory memory;
  account_->Describe(&memory);
  EXPECT_EQ(memory.planned_bytes(), plan_of_several_->memory.TotalBytes(2));
  EXPECT_EQ(plan_of_several_->memory.undo_bytes,
            plan_of_several_->memory.shards_bytes + plan_of_several_->memory.optimizer_bytes);
}

TEST_F(MemoryOfSeveralTest, TheWorkspaceOfMatricesIsPlannedAndThere) {
  v1::Memory memory;
  account_->Describe(&memory);
  EXPECT_EQ(memory.planned_bytes(), plan_of_several_->memory.TotalBytes(2));
  for (const v1::Purpose& purpose : memory.purposes()) {
    if (purpose.purpose() != "update workspace") continue;
    EXPECT_EQ(purpose.planned_bytes(), plan_of_several_->memory.workspace_bytes);
    EXPECT_EQ(purpose.allocated_bytes(), purpose.planned_bytes());
    EXPECT_GE(purpose.planned_bytes(), int64_t{16} << 20);  // one matrix, and so one rank's
    EXPECT_NE(memory_->pointers().workspace, nullptr);
    return;
  }
  ADD_FAILURE() << "no such purpose: " << memory.ShortDebugString();
}

TEST_F(MemoryAccountTest, TotalsAreTheSumOfAllPurposes) {
  Attach(1);
  v1::Memory memory;
  account_->Describe(&memory);
  EXPECT_EQ(memory.job(), "job");
  int64_t planned = 0;
  int64_t allocated = 0;
  for (const v1::Purpose& purpose : memory.purposes()) {
    planned += purpose.planned_bytes();
    allocated += purpose.allocated_bytes();
  }
  EXPECT_EQ(memory.planned_bytes(), planned);
  EXPECT_EQ(memory.allocated_bytes(), allocated);
  EXPECT_GT(allocated, 0);
}

}  // namespace
}  // namespace shardd
