// Gradients whose memory trainers have given back, or have not asked for yet: reserved, and shown as not there.

#include <fcntl.h>
#include <linux/falloc.h>

#include <cstring>

#include "server/storage/job_slab.h"
#include "tests/server/job/job_core_fixture.h"

namespace shardd {
namespace {

constexpr int64_t kNumel = int64_t{1} << 16;
constexpr int64_t kBytes = 4 * kNumel;

class GivenBackMemoryTest : public JobCoreTest {
 protected:
  GivenBackMemoryTest() : JobCoreTest(Large(kNumel)) {}
  static SpecBuilder Large(int64_t numel, bool late = false) {
    SpecBuilder builder(2);
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
    builder.config().set_trainers_never_write(true);
    builder.config().set_late_gradients(late);
    builder.Param(0, "w", {numel});
    return builder;
  }
  int64_t Reserved() {
    int64_t bytes = 0;
    OnLoop([&] { bytes = job_->memory_account().reserved_bytes(); });
    return bytes;
  }
  v1::Purpose Gradients() {
    v1::Memory memory;
    OnLoop([&] { job_->memory_account().Describe(&memory); });
    for (const v1::Purpose& purpose : memory.purposes()) {
      if (purpose.purpose() == "gradients") return purpose;
    }
    return v1::Purpose();
  }
  // As a trainer's shardd_give_back_gradient.
  void GiveBack(int64_t offset_bytes, int64_t size_bytes) {
    ASSERT_EQ(fallocate(job_->memory().gradients()->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset_bytes,
                        size_bytes),
              0);
  }
};

TEST_F(GivenBackMemoryTest, IsReservedUntilTheNextReductionAndShownInStatus) {
  const int64_t before = Reserved();
  EXPECT_EQ(Gradients().allocated_bytes(), kBytes);
  GiveBack(0, kBytes / 4);
  EXPECT_EQ(Reserved(), before + kBytes / 4);
  EXPECT_EQ(Gradients().allocated_bytes(), kBytes - kBytes / 4);
  GiveBack(0, kBytes);
  EXPECT_EQ(Reserved(), before + kBytes) << "nothing is counted twice";
  EXPECT_EQ(Gradients().allocated_bytes(), 0);
  EXPECT_EQ(Gradients().planned_bytes(), kBytes);
  for (int rank = 0; rank < kRanks; ++rank) Train(rank);
  ASSERT_TRUE(Until([&] { return job_->view().committed_step() == 1; }));
  EXPECT_EQ(Reserved(), before);
  EXPECT_EQ(Gradients().allocated_bytes(), kBytes);
}

TEST_F(GivenBackMemoryTest, IsFirstTakenWithGradientsWhereTrainersGiveItBack) {
  constexpr int64_t kLateNumel = int64_t{1} << 25;  // 128 MiB of gradients
  for (const bool late : {false, true}) {
    const ShardPlan plan = Large(kLateNumel, late).Plan();
    const auto memory = JobMemory::Create(plan, "late");
    ASSERT_TRUE(memory.ok()) << memory.status();
    EXPECT_EQ((*memory)->given_back_bytes(), late ? 4 * kLateNumel : 0);
    EXPECT_EQ((*memory)->gradients()->allocated_bytes(), late ? 0 : 4 * kLateNumel);
  }
  const ShardPlan small = Large(kLateNumel / 2, /*late=*/true).Plan();
  const auto memory = JobMemory::Create(small, "small");
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ((*memory)->given_back_bytes(), 0) << "not worth it";
}

// Of trainers with their own optimizer: what passes read is its shards.
class SnapshotMemoryTest : public JobCoreTest {
 protected:
  static constexpr int64_t kShardsBytes = int64_t{4} << 20;
  static SpecBuilder OfTrainers() {
    SpecBuilder builder(kRanks);
    builder.config().set_trainers_never_write(false);
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
    builder.config().mutable_optimizer()->set_trainer_states(1);
    builder.Param(0, "w", {kShardsBytes / 4});
    return builder;
  }
  SnapshotMemoryTest() : JobCoreTest(OfTrainers()) {}
  int64_t Reserved() {
    int64_t bytes = 0;
    OnLoop([&] { bytes = job_->memory_account().reserved_bytes(); });
    return bytes;
  }
};

TEST_F(SnapshotMemoryTest, IsReservedForShardsThatASnapshotHasNot) {
  const JobSlab* const snapshot = job_->memory().kept();
  EXPECT_EQ(snapshot->allocated_bytes(), snapshot->size_bytes() - kShardsBytes) << "it was taken with version 1";
  const int64_t before = Reserved();
  std::memset(snapshot->At(0), 1, kShardsBytes);
  EXPECT_EQ(Reserved(), before - kShardsBytes);
}

TEST_F(SnapshotMemoryTest, ShardsThatASnapshotHasNotAreNotSaidToBeAllocated) {
  const JobMemory& memory = job_->memory();
  int64_t whole_bytes = memory.kept()->size_bytes();
  for (const auto& [fd, slab] : memory.mapped()) whole_bytes += slab == nullptr ? 0 : slab->size_bytes();
  EXPECT_EQ(memory.allocated_bytes(), whole_bytes - kShardsBytes);
  std::memset(memory.kept()->At(0), 1, kShardsBytes);
  EXPECT_EQ(memory.allocated_bytes(), whole_bytes);
}

}  // namespace
}  // namespace shardd
