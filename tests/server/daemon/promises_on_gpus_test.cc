// Values that ranks have loaded on GPUs, and a daemon has promised to node 0 before it died, as the next one reads
// them.

#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/daemon/take_up/taken_up_job.h"
#include "server/device/cuda/make_cuda_devices.h"
#include "server/device/device.h"
#include "server/device/device_memory.h"
#include "server/storage/job_slab.h"
#include "server/storage/undo_slab.h"
#include "tests/common/plan/node_specs.h"
#include "tests/fakes/cuda/kernels.h"
#include "tests/fakes/cuda/machine.h"

namespace shardd {
namespace {

constexpr float kCommittedValue = 1, kLoadedValue = 2;
constexpr uint64_t kCommittedVersion = 9, kPromisedIn = 70;

class PromisesOnGpus : public ::testing::Test {
 protected:
  PromisesOnGpus() : driver_(fake_cuda::Table()) {
    fake_cuda::AddReferenceKernels(machine_);
    (void)driver_->Init(0);
    devices_ = std::move(MakeCudaDevices(driver_, {true, {}}, absl::MakeConstSpan(fake_cuda::kFatbinMagic))->devices);
    Describe(v1::STRATEGY_FULL_SHARD);
  }
  void Describe(v1::Strategy strategy) {
    SpecBuilder builder(/*world_size=*/1);
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
    builder.config().set_strategy(strategy);
    builder.config().set_layout(v1::LAYOUT_FLAT);
    builder.Param(0, "weight", {4096});
    AddNodes(&builder, 2);
    *job_.mutable_spec() = builder.spec();
    plan_ = PlanOn(builder, /*node=*/1);
    own_ = HeldRanges(plan_, HeldSlab::kShards, sizeof(float)).front().first;
  }
  SlabPlace place() const { return {devices_[0]->memory(), {devices_[0]->memory()}}; }
  float ShardOf(const JobMemory& memory) const {
    float value = 0;
    EXPECT_TRUE(memory.shards()->Read(own_, &value, sizeof(value)).ok());
    return value;
  }
  // Of a daemon that has died behind `last`, with what its ranks had loaded over version 9.
  absl::StatusOr<TakenUpJob> TakeUp(const std::function<void(TakeUpLog&)>& last) {
    const TakeUpLog::Sizes sizes = TakeUpLog::SizesFor(plan_);
    auto memory = JobMemory::Create(plan_, "job", 0, place(), /*extends=*/false, /*outlives=*/true);
    EXPECT_TRUE(memory.ok()) << memory.status();
    const std::unique_ptr<Journal> journal = *Journal::Create(sizes.place_bytes);
    const std::unique_ptr<TakeUpLog> log = *TakeUpLog::Create(sizes);
    v1::CommittedRecord facts;
    facts.add_step_counts(4);
    facts.add_trainer_states("state");
    EXPECT_TRUE(log->Commit(facts, {1, 4, kCommittedVersion}).ok());
    EXPECT_TRUE((*memory)->shards()->Write(own_, &kCommittedValue, sizeof(float)).ok());
    EXPECT_TRUE((*memory)->undo()->Save((*memory)->shards(), own_, sizeof(float), kCommittedVersion).ok());
    EXPECT_TRUE((*memory)->shards()->Write(own_, &kLoadedValue, sizeof(float)).ok());
    last(*log);
    job_.set_format(1);
    job_.set_node(1);
    job_.set_plan_digest(plan_.digest);
    job_.clear_gpu_uuids();
    job_.clear_slabs_on_gpus();
    job_.add_gpu_uuids(devices_[0]->memory()->device_uuid());
    (*memory)->DescribeKept(job_.mutable_slabs_on_gpus());
    JobMemory::Kept kept;
    const auto put = [&kept](const std::string& name, int fd) {
      kept[name] = UniqueFd(dup(fd));
      return absl::OkStatus();
    };
    const std::unique_ptr<Slab> record = *MakeCustodyRecord(kCustodyJobName, job_);
    EXPECT_TRUE((*memory)->KeepBy(put).ok());
    EXPECT_TRUE(put(kCustodyJobName, record->fd()).ok());
    EXPECT_TRUE(put(kCustodyJournalName, journal->fd()).ok());
    EXPECT_TRUE(put(kCustodyLogName, log->fd()).ok());
    memory->reset();
    return ReadTakenUpJob(std::move(kept), {{devices_[0].get()}, [this](int) { return place(); }});
  }
  static v1::PromisedValuesRecord Promise() {
    v1::PromisedValuesRecord promise;
    promise.set_generation(kPromisedIn);
    promise.set_version(kCommittedVersion + 1);
    promise.add_step_counts(5);
    return promise;
  }
  static void Promises(TakeUpLog& log) { EXPECT_TRUE(log.PromiseValues(Promise()).ok()); }

  fake_cuda::Machine machine_;
  const CudaDriver driver_;
  std::vector<std::unique_ptr<Device>> devices_;
  v1::CustodyJob job_;
  ShardPlan plan_;
  int64_t own_ = 0;  // bytes at which this node's part of the shards begins
};

// Nobody could send them to this node, where the others have agreed on them.
TEST_F(PromisesOnGpus, LoadedValuesStayBehindAPromise) {
  const absl::StatusOr<TakenUpJob> job = TakeUp(Promises);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->committed.version, kCommittedVersion);
  EXPECT_TRUE(job->node.promised_values);
  EXPECT_EQ(job->node.promised_in, kPromisedIn);
  ASSERT_TRUE(job->committed.promised_values.has_value());
  EXPECT_EQ(job->committed.promised_values->step_counts(0), 5);
  EXPECT_EQ(ShardOf(*job->memory), kLoadedValue);
  UndoSlab* const undo = job->memory->undo();
  ASSERT_TRUE(undo->Has(kCommittedVersion)) << "for whoever hears that nothing comes of it";
  for (bool more = true; more;) ASSERT_TRUE(undo->PutBack(kCommittedVersion, &more).ok());
  EXPECT_EQ(ShardOf(*job->memory), kCommittedValue);
}

TEST_F(PromisesOnGpus, WithoutAPromiseLoadedValuesAreTakenBack) {
  const absl::StatusOr<TakenUpJob> job = TakeUp([](TakeUpLog&) {});
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_FALSE(job->node.promised_values);
  EXPECT_FALSE(job->committed.promised_values.has_value());
  EXPECT_EQ(ShardOf(*job->memory), kCommittedValue);
  EXPECT_FALSE(job->memory->undo()->Has(kCommittedVersion));
}

// Another node sends this one what it lacks.
TEST_F(PromisesOnGpus, ReplicasKeepNone) {
  Describe(v1::STRATEGY_HYBRID_SHARD);
  const absl::StatusOr<TakenUpJob> job = TakeUp(Promises);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_FALSE(job->node.promised_values);
  EXPECT_EQ(job->node.promised_in, 0u);
  EXPECT_EQ(ShardOf(*job->memory), kCommittedValue);
}

TEST_F(PromisesOnGpus, APromiseOfAnotherPlanIsRefused) {
  v1::PromisedValuesRecord promise = Promise();
  promise.add_trainer_states("one");
  promise.add_trainer_states("of a rank that is none");
  const auto job = TakeUp([&](TakeUpLog& log) { EXPECT_TRUE(log.PromiseValues(promise).ok()); });
  EXPECT_EQ(job.status().code(), absl::StatusCode::kDataLoss) << job.status();
}

}  // namespace
}  // namespace shardd
