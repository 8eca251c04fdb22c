// Memory of a job on GPUs is taken up by the next daemon from descriptors and a description alone.

#include "server/storage/kept_on_gpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/plan/slab_holes.h"
#include "common/shm/open_files.h"
#include "common/tensor/update_log.h"
#include "server/device/cuda/cuda_memory.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"
#include "server/storage/kept_pieces.h"
#include "server/storage/old_values_plan.h"
#include "tests/common/plan/node_specs.h"
#include "tests/fakes/cuda/machine.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPage = int64_t{2} << 20;

class KeptOnGpus : public ::testing::Test {
 protected:
  KeptOnGpus() : machine_(Machine()), driver_(fake_cuda::Table()) {
    (void)driver_->Init(0);
    for (int gpu = 0; gpu < 2; ++gpu) gpus_.push_back(*CudaMemory::Create(driver_, gpu, absl::Seconds(10)));
    place_ = {gpus_[0].get(), {gpus_[0].get(), gpus_[1].get()}};
  }
  static fake_cuda::MachineOptions Machine() {
    fake_cuda::MachineOptions options;
    options.gpus = 2;
    return options;
  }
  static ShardPlan Plan(int64_t numel, v1::OptimizerKind kind = v1::OPTIMIZER_KIND_ADAMW) {
    SpecBuilder builder(/*world_size=*/3);
    builder.config().mutable_optimizer()->set_kind(kind);
    builder.config().set_unshard_mode(v1::UNSHARD_MODE_POOLED);
    builder.config().set_unsharded_pools(2);
    builder.Param(0, "w", {numel});
    return builder.Plan();
  }
  // Of a job that outlives its daemon, and described in slabs_.
  std::unique_ptr<JobMemory> Create(const ShardPlan& plan) {
    auto memory = JobMemory::Create(plan, "job", 0, place_, /*extends=*/false, /*outlives=*/true);
    EXPECT_TRUE(memory.ok()) << memory.status();
    (*memory)->DescribeKept(&slabs_);
    return *std::move(memory);
  }
  // What a custodian is given of the job.
  KeptFds Keep(JobMemory& memory) {
    auto kept = std::make_shared<KeptFds>();
    EXPECT_TRUE(memory
                    .KeepBy([kept](const std::string& name, int fd) {
                      (*kept)[name] = UniqueFd(dup(fd));
                      return absl::OkStatus();
                    })
                    .ok());
    return std::move(*kept);
  }

  fake_cuda::Machine machine_;
  const CudaDriver driver_;
  std::vector<std::unique_ptr<CudaMemory>> gpus_;
  SlabPlace place_;
  CustodySlabs slabs_;
};

TEST_F(KeptOnGpus, OldValuesOfEachRankLieOnItsGpu) {
  const OldValuesPlan small = *PlanOldValues(Plan(3 * 1024), place_);
  EXPECT_EQ(small.numel, 1024);
  EXPECT_EQ(small.stride_bytes, kPage);
  ASSERT_EQ(small.parts.size(), 3u);
  EXPECT_EQ(small.parts[1].on, gpus_[1].get());
  EXPECT_EQ(small.parts[2].on, gpus_[0].get());
  // Parameter and two moments of a piece, whatever the model.
  const OldValuesPlan large = *PlanOldValues(Plan(int64_t{40} << 20), place_);
  EXPECT_EQ(large.numel, kLoggedPieceNumel);
  EXPECT_EQ(large.stride_bytes, 3 * 4 * kLoggedPieceNumel);
  EXPECT_EQ(PlanOldValues(Plan(1 << 20, v1::OPTIMIZER_KIND_SGD), place_)->stride_bytes, kPage);
  EXPECT_EQ(PlanOldValues(Plan(1 << 20, v1::OPTIMIZER_KIND_NONE), place_)->numel, 0);
  const SlabPlace one{gpus_[0].get(), {gpus_[0].get()}};
  EXPECT_EQ(PlanOldValues(Plan(3 * 1024), one)->parts.size(), 1u);
}

TEST_F(KeptOnGpus, AnotherDaemonHasEveryByteAtTheSamePlaces) {
  const ShardPlan plan = Plan(int64_t{3} << 20);
  auto memory = Create(plan);
  KeptFds kept = Keep(*memory);
  EXPECT_EQ(kept.count("shards-0"), 1u);
  EXPECT_EQ(kept.count("old values-2"), 1u);
  EXPECT_EQ(kept.count("unsharded pool-1"), 1u);
  const std::string bytes(5000, 'x');
  const int64_t over_an_edge = memory->shards_boundaries().front() - 2500;
  ASSERT_TRUE(memory->shards()->Write(over_an_edge, bytes.data(), 5000).ok());
  memory = nullptr;
  EXPECT_EQ(machine_.live().memory.mappings, 0u) << "none but the custodian has it";

  auto next = JobMemory::TakeUp(plan, "job", std::move(kept), place_, slabs_);
  ASSERT_TRUE(next.ok()) << next.status();
  std::string got(5000, ' ');
  ASSERT_TRUE((*next)->shards()->Read(over_an_edge, got.data(), 5000).ok());
  EXPECT_EQ(got, bytes);
  UpdateLog log{};
  const Logged logged = (*next)->LoggedBy(&log, 2);
  EXPECT_EQ(logged.place.old, (*next)->old_values()->At(2 * 6 * kPage)) << "three arrays of 1 Mi elements are 12 MiB";
  EXPECT_EQ(logged.place.numel, int64_t{1} << 20);
  EXPECT_EQ((*next)->LoggedBy(nullptr, 2).place.old, nullptr);
}

TEST_F(KeptOnGpus, ACutJobsPartsAreTakenUpWithHoles) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  SpecBuilder builder(/*world_size=*/2);
  builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  builder.config().set_strategy(v1::STRATEGY_FULL_SHARD);
  builder.config().set_layout(v1::LAYOUT_FLAT);
  builder.Param(0, "w", {16 * kMiB});
  AddNodes(&builder, 2);
  const ShardPlan plan = PlanOn(builder, /*node=*/1);
  auto memory = Create(plan);
  EXPECT_EQ(memory->shards()->size_bytes(), 64 * kMiB);
  EXPECT_EQ(memory->shards()->allocated_bytes(), 32 * kMiB + kPage);
  EXPECT_EQ(memory->optimizer()->allocated_bytes(), 64 * kMiB + kPage);
  EXPECT_EQ(memory->given_back_bytes(), 0);
  EXPECT_EQ(memory->quota_bytes(), QuotaBytesOf(plan, /*on_gpus=*/true));
  EXPECT_NE(memory->quota_bytes(), QuotaBytesOf(plan, /*on_gpus=*/false));
  v1::Memory described;
  memory->Describe(plan, &described);
  EXPECT_EQ(described.purposes(0).planned_bytes(), 32 * kMiB + kPage);
  EXPECT_EQ(described.purposes(0).allocated_bytes(), 32 * kMiB + kPage);
  KeptFds kept = Keep(*memory);
  const std::string bytes(5000, 'x');
  ASSERT_TRUE(memory->shards()->Write(40 * kMiB, bytes.data(), 5000).ok());
  EXPECT_EQ(memory->shards()->Write(20 * kMiB, bytes.data(), 1).code(), absl::StatusCode::kInternal);
  memory = nullptr;
  ASSERT_TRUE(CheckAllKept(slabs_, kept).ok());
  auto next = JobMemory::TakeUp(plan, "job", std::move(kept), place_, slabs_);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ((*next)->shards()->allocated_bytes(), 32 * kMiB + kPage);
  std::string got(5000, ' ');
  ASSERT_TRUE((*next)->shards()->Read(40 * kMiB, got.data(), 5000).ok());
  EXPECT_EQ(got, bytes);
}

// Limit of this process's open files, which decides of how many pieces slabs are.
class ScopedFiles {
 public:
  explicit ScopedFiles(int64_t left) {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    rlimit limit = before_;
    limit.rlim_cur = static_cast<rlim_t>(CountOpenFiles().open + left);
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  }
  ~ScopedFiles() { EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before_), 0); }

 private:
  rlimit before_ = {};
};

class KeptSnapshots : public KeptOnGpus {
 protected:
  // Rows of 12 parameters over three nodes, two pages of which are others'; torch's Adam in the trainers.
  static ShardPlan CutPlan() {
    SpecBuilder builder(/*world_size=*/2);
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
    builder.config().mutable_optimizer()->set_trainer_states(2);
    builder.config().set_trainers_never_write(false);
    builder.config().set_pass_copies(true);
    builder.config().set_strategy(v1::STRATEGY_FULL_SHARD);
    builder.config().set_layout(v1::LAYOUT_DIM0);
    for (int i = 0; i < 12; ++i) builder.Param(0, absl::StrCat("w", i), {6, kPage / 8});
    AddNodes(&builder, 3);
    return PlanOn(builder, /*node=*/1);
  }
  // So many pieces for a section: six of the snapshots, and seven other slabs.
  static int64_t FilesFor(int pieces) { return 14 * 2 + 32 + int64_t{2} * 3 * 13 * pieces; }
};

// Trainers do not map it, so it may have more pieces than any other slab.
TEST_F(KeptSnapshots, OfManyParametersTakeNoMoreThanTheNodesPart) {
  const ShardPlan plan = CutPlan();
  const ScopedFiles files(FilesFor(26));
  auto memory = Create(plan);
  EXPECT_GT(memory->kept()->on_devices()->pieces().size(), size_t{6 * 12 * 2 - 2});
  EXPECT_EQ(memory->kept()->allocated_bytes(), (6 * 12 + 1) * kPage) << "and the first page";
  v1::Memory described;
  memory->Describe(plan, &described);
  int64_t allocated = 0;
  for (const v1::Purpose& purpose : described.purposes()) {
    if (!purpose.devices().empty()) allocated += purpose.allocated_bytes();
    if (purpose.purpose() != "snapshot") continue;
    EXPECT_EQ(purpose.planned_bytes(), purpose.allocated_bytes());
  }
  EXPECT_EQ(memory->allocated_bytes(), allocated);
}

// Whoever made the job laid its slabs out by what it could, and by what its build knew of.
TEST_F(KeptSnapshots, AreTakenUpAsTheyWereLaidOut) {
  const ShardPlan plan = CutPlan();
  std::vector<DeviceSlab::Piece> pieces;
  KeptFds kept;
  const std::string bytes(5000, 'x');
  const int64_t at = plan.memory.snapshot_bytes + 2 * kPage;  // the node's part of the second snapshot
  {
    const ScopedFiles few(FilesFor(8));
    auto memory = Create(plan);
    pieces = memory->kept()->on_devices()->pieces();
    EXPECT_GT(memory->kept()->allocated_bytes(), (6 * 12 + 1) * kPage);
    ASSERT_TRUE(memory->kept()->Write(at, bytes.data(), 5000).ok());
    kept = Keep(*memory);
  }
  const ScopedFiles more(FilesFor(40));
  auto next = JobMemory::TakeUp(plan, "job", std::move(kept), place_, slabs_);
  ASSERT_TRUE(next.ok()) << next.status();
  const std::vector<DeviceSlab::Piece>& taken = (*next)->kept()->on_devices()->pieces();
  ASSERT_EQ(taken.size(), pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    EXPECT_EQ(taken[i].on, pieces[i].on) << i;
    EXPECT_EQ(taken[i].size_bytes, pieces[i].size_bytes) << i;
  }
  std::string got(5000, ' ');
  ASSERT_TRUE((*next)->kept()->Read(at, got.data(), 5000).ok());
  EXPECT_EQ(got, bytes);
}

// Gradients that are made again have the pieces that the description tells of.
TEST_F(KeptOnGpus, RemadeGradientsReplaceTheFormerOnes) {
  const ShardPlan plan = Plan(int64_t{3} << 20);
  auto memory = Create(plan);
  std::map<std::string, int> handed;
  KeptFds kept;
  ASSERT_TRUE(memory
                  ->KeepBy([&](const std::string& name, int fd) {
                    ++handed[name];
                    kept[name] = UniqueFd(dup(fd));
                    return absl::OkStatus();
                  })
                  .ok());
  auto again = memory->MakeGradientsAgain(plan);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(handed["shards-0"], 1);
  EXPECT_EQ(handed["gradients-0"], 2);
  ASSERT_TRUE((*again)->Write(0, "new", 3).ok());
  auto taken = TakeUpPieces("gradients", slabs_, place_, &kept);
  ASSERT_TRUE(taken.ok()) << taken.status();
  std::string got(3, ' ');
  ASSERT_TRUE(gpus_[0]->Read(got.data(), (*taken)->data(), 3).ok());
  EXPECT_EQ(got, "new");
}

TEST_F(KeptOnGpus, WhatIsNotThereIsNamed) {
  const ShardPlan plan = Plan(int64_t{3} << 20);
  auto memory = Create(plan);
  KeptFds kept = Keep(*memory);
  EXPECT_EQ(TakeUpPieces("snapshot", slabs_, place_, &kept).status().code(), absl::StatusCode::kNotFound);
  const SlabPlace one{gpus_[0].get(), {gpus_[0].get()}};
  const absl::Status elsewhere = TakeUpPieces("shards", slabs_, one, &kept).status();
  EXPECT_EQ(elsewhere.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(elsewhere.message()), HasSubstr("lies on a GPU that this daemon does not have"));
  kept = Keep(*memory);
  kept.erase("shards-1");
  const absl::Status lost = TakeUpPieces("shards", slabs_, place_, &kept).status();
  EXPECT_EQ(lost.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(lost.message()), HasSubstr("piece 1 of its \"shards\" is not there"));
}

}  // namespace
}  // namespace shardd
