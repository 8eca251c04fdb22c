// A rank's part of sums in its own context, on the fake driver in this process: the daemon's ring is this test's own.

#include "client/c/gpu/trainer_sums.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/fakes/cuda/kernels.h"
#include "tests/fakes/cuda/machine.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kLimit = absl::Seconds(60);
constexpr uint64_t kEpoch = 5;
constexpr int64_t kNumel = 64;

SumRecord GoodRecord() {
  SumRecord record = {};
  record.kind = SumKind::kSum;
  record.ranks[0] = 3;
  record.source_dtype = cuda::kFloat32;
  record.scale = 0.5f;
  record.numel = kNumel;
  return record;
}
constexpr SumMemory kMemory = {nullptr, 4 * kNumel, nullptr, 4 * kNumel, 4096, /*rank=*/0, /*world_size=*/2};

TEST(CheckSumRecordTest, WhatFitsThePlanIsTaken) {
  EXPECT_TRUE(CheckSumRecord(GoodRecord(), kMemory).ok());
  SumRecord zero = {};
  zero.kind = SumKind::kZero;
  zero.numel = 4 * kNumel;
  EXPECT_TRUE(CheckSumRecord(zero, kMemory).ok());
  zero.kind = SumKind::kCopy;
  EXPECT_TRUE(CheckSumRecord(zero, kMemory).ok());
}

TEST(CheckSumRecordTest, WhatDoesNotIsRefused) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const auto refused = [](auto&& change) {
    for (const SumKind kind : {SumKind::kSum, SumKind::kCopy, SumKind::kZero}) {
      SumRecord record = GoodRecord();
      record.kind = kind;
      if (!change(record)) continue;  // of no meaning for this kind
      EXPECT_EQ(CheckSumRecord(record, kMemory).code(), absl::StatusCode::kInternal) << static_cast<int>(kind);
    }
  };
  for (const int64_t numel : {int64_t{0}, int64_t{-1}, 4 * kNumel + 1, kMost, kMost / 4 + 2}) {
    refused([numel](SumRecord& record) { return record.numel = numel, true; });
  }
  for (const int64_t offset : {int64_t{-4}, 4 * kNumel, kMost, kMost - 3, int64_t{4 * kNumel - 4}}) {
    refused([offset](SumRecord& record) { return record.dst_offset_bytes = offset, true; });
    refused([offset](SumRecord& record) {
      record.source_offset_bytes = offset;
      return record.kind != SumKind::kZero;
    });
  }
  refused(
      [](SumRecord& record) { return record.dst_offset_bytes = 2, record.numel = 4, record.kind == SumKind::kSum; });
  refused(
      [](SumRecord& record) { return record.source_offset_bytes = 2, record.numel = 4, record.kind == SumKind::kSum; });
  refused([](SumRecord& record) { return record.kind = SumKind::kInvalid, true; });
  refused([](SumRecord& record) { return record.kind = static_cast<SumKind>(4), true; });
  for (const int32_t dtype : {-1, 0, 4, 99}) {
    refused([dtype](SumRecord& record) { return record.source_dtype = dtype, record.kind == SumKind::kSum; });
    if (dtype == 0) continue;
    refused([dtype](SumRecord& record) { return record.reduce_dtype = dtype, record.kind == SumKind::kSum; });
    refused([dtype](SumRecord& record) { return record.keep = dtype, record.kind == SumKind::kSum; });
  }
  refused([](SumRecord& record) { return record.accumulate = 2, record.kind == SumKind::kSum; });
  for (const int rank : {2, 63, 64, 127}) {
    refused([rank](SumRecord& record) {
      record.ranks[rank / 64] |= uint64_t{1} << (rank % 64);
      return record.kind == SumKind::kSum;
    });
  }
  refused([](SumRecord& record) { return record.ranks[0] = 0, record.kind == SumKind::kSum; });
}

// Whatever bytes lie there.
TEST(CheckSumRecordTest, WhatIsTakenLiesWithinTheMemory) {
  std::mt19937_64 random(17);
  int taken = 0;
  for (int i = 0; i < 200000; ++i) {
    SumRecord record = GoodRecord();
    record.kind = static_cast<SumKind>(random() % 5);
    for (int64_t* field : {&record.source_offset_bytes, &record.dst_offset_bytes, &record.numel}) {
      *field = random() % 8 == 0 ? static_cast<int64_t>(random()) : static_cast<int64_t>(random() % (6 * kNumel)) - 8;
    }
    record.source_dtype = static_cast<int32_t>(random() % 5);
    if (!CheckSumRecord(record, kMemory).ok()) continue;
    ++taken;
    const int64_t element = record.kind != SumKind::kSum ? 1 : record.source_dtype == cuda::kFloat32 ? 4 : 2;
    const int64_t written = record.kind == SumKind::kSum ? 4 * record.numel : record.numel;
    ASSERT_GT(record.numel, 0);
    ASSERT_GE(record.dst_offset_bytes, 0);
    ASSERT_LE(record.dst_offset_bytes + written, 4 * kNumel);
    if (record.kind == SumKind::kZero) continue;
    ASSERT_GE(record.source_offset_bytes, 0);
    ASSERT_LE(record.source_offset_bytes + element * record.numel, 4 * kNumel);
  }
  EXPECT_GT(taken, 100);
}

class TrainerSumsTest : public ::testing::Test {
 protected:
  explicit TrainerSumsTest(const fake_cuda::MachineOptions& options = {})
      : machine_(options), driver_(fake_cuda::Table()) {
    fake_cuda::AddReferenceKernels(machine_);
    EXPECT_EQ(driver_->Init(0), CUDA_SUCCESS);
    CUcontext context = nullptr;
    EXPECT_EQ(driver_->DevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
    const ScopedCudaContext current(driver_, context);
    EXPECT_EQ(driver_->LibraryLoadData(&library_, fake_cuda::kFatbinMagic, nullptr, nullptr, 0, nullptr, nullptr, 0),
              CUDA_SUCCESS);
    EXPECT_EQ(driver_->LibraryGetKernel(&kernel_, library_, cuda::kReduceKernel), CUDA_SUCCESS);
    pages_ = mmap(nullptr, kPages, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    gradients_ = *CudaSlab::Create(&driver_, 0, kBytes, "gradients");
    for (int rank = 0; rank < 2; ++rank) slots_.push_back(*CudaSlab::Create(&driver_, 0, kBytes, "slots"));
    ring().written.store(TimelineValue(kEpoch, 0));
    for (int rank = 0; rank < 2; ++rank) {
      ring().sessions[rank].store(static_cast<uint64_t>(70 + rank));
      for (int i = 0; i < kNumel; ++i) Slot(rank)[i] = static_cast<float>(rank + 1);
    }
  }
  ~TrainerSumsTest() override {
    machine_.HangGpu(0, false);
    EXPECT_TRUE(sums_ == nullptr || sums_->Stop(kLimit));
    sums_ = nullptr;
    slots_.clear();
    gradients_ = CudaSlab();
    (void)driver_->LibraryUnload(library_);
    (void)driver_->DevicePrimaryCtxRelease(0);
    munmap(pages_, kPages);
  }
  void Start() {
    TrainerSums::Options options;
    options.driver = &driver_;
    options.kernel = kernel_;
    options.epoch = kEpoch;
    options.memory = kMemory;
    options.memory.gradients = static_cast<char*>(gradients_.data());
    options.memory.slots = static_cast<char*>(slots_[0].data());
    options.memory.slab_bytes = slots_[0].size_bytes();
    options.ring = &ring();
    options.words = &words();
    options.fetch = [this](int rank, const std::function<bool()>&) -> absl::StatusOr<UniqueFd> {
      ++fetched_;
      return rank == 1 ? slots_[1].ExportFd() : absl::FailedPreconditionError("no such peer");
    };
    absl::StatusOr<std::unique_ptr<TrainerSums>> sums = TrainerSums::Start(std::move(options));
    ASSERT_TRUE(sums.ok()) << sums.status();
    sums_ = *std::move(sums);
  }
  void Tell(const SumRecord& record) {
    SumRecord& place = ring().records[told_ % kSumRecords];
    place = record;
    place.sequence = told_++;
    TimelineStore(ring().written, TimelineValue(kEpoch, told_), &words().waiting);
  }
  template <typename Come>
  bool Await(Come&& come) {
    const absl::Time end = absl::Now() + kLimit;
    while (!come() && absl::Now() < end) absl::SleepFor(absl::Microseconds(100));
    return come();
  }
  bool AwaitSummed() {
    return Await([this] { return words().summed.load() == TimelineValue(kEpoch, told_); });
  }
  SumRing& ring() { return *static_cast<SumRing*>(pages_); }
  SumWords& words() { return *reinterpret_cast<SumWords*>(static_cast<char*>(pages_) + kPages - 4096); }
  float* Gradients() { return static_cast<float*>(gradients_.data()); }
  float* Slot(int rank) { return static_cast<float*>(slots_[static_cast<size_t>(rank)].data()); }

  static constexpr int64_t kBytes = 1 << 20;
  static constexpr size_t kPages = 16 * 4096;
  static_assert(sizeof(SumRing) <= kPages - 4096);
  fake_cuda::Machine machine_;
  const CudaDriver driver_;
  CUlibrary library_ = nullptr;
  CUkernel kernel_ = nullptr;
  void* pages_ = nullptr;
  CudaSlab gradients_;
  std::vector<CudaSlab> slots_;
  std::atomic<int> fetched_ = 0;
  uint64_t told_ = 0;
  std::unique_ptr<TrainerSums> sums_;
};

TEST_F(TrainerSumsTest, SumsFollowTheToldOrderAndGpuProgressIsReported) {
  Start();
  Tell(GoodRecord());
  ASSERT_TRUE(AwaitSummed());
  for (int i = 0; i < kNumel; ++i) EXPECT_EQ(Gradients()[i], 1.5f) << i;
  SumRecord zero = {};
  zero.kind = SumKind::kZero;
  zero.numel = 16;
  Tell(zero);
  SumRecord more = GoodRecord();
  more.accumulate = 1;
  more.ranks[0] = 2;
  Tell(more);
  SumRecord copy = {};
  copy.kind = SumKind::kCopy;
  copy.dst_offset_bytes = 32;
  copy.numel = 16;
  Tell(copy);
  ASSERT_TRUE(AwaitSummed());
  EXPECT_EQ(Gradients()[0], 1.0f);
  EXPECT_EQ(Gradients()[4], 2.5f);
  EXPECT_EQ(Gradients()[8], 1.0f);
  EXPECT_EQ(fetched_, 1) << "a peer is mapped once";
}

TEST_F(TrainerSumsTest, AnotherSessionOfAPeerIsMappedAnew) {
  Start();
  Tell(GoodRecord());
  ASSERT_TRUE(AwaitSummed());
  ring().sessions[1].store(99);
  Tell(GoodRecord());
  ASSERT_TRUE(AwaitSummed());
  EXPECT_EQ(fetched_, 2);
}

TEST_F(TrainerSumsTest, NothingIsSummedWhileTheGpuHasNotComeThere) {
  Start();
  machine_.HangGpu(0);
  Tell(GoodRecord());
  EXPECT_FALSE(sums_->Stop(absl::Milliseconds(200))) << "a kernel is under way";
  EXPECT_EQ(words().summed.load(), 0u);
  EXPECT_EQ(words().ended.load(), 0u);
  machine_.HangGpu(0, false);
  EXPECT_TRUE(sums_->Stop(kLimit));
  EXPECT_EQ(words().ended.load(), 1u);
}

TEST_F(TrainerSumsTest, SumsEndWithTheEpochWhenTheGpuIsDone) {
  Start();
  Tell(GoodRecord());
  ASSERT_TRUE(AwaitSummed());
  std::fill(Gradients(), Gradients() + kNumel, -1.0f);
  ring().records[told_ % kSumRecords] = GoodRecord();
  TimelineStore(ring().written, TimelineValue(kEpoch + 1, told_ + 1), &words().waiting);
  ASSERT_TRUE(Await([this] { return words().ended.load() != 0; }));
  EXPECT_EQ(words().ended.load(), 1u);
  EXPECT_EQ(Gradients()[0], -1.0f);
}

TEST_F(TrainerSumsTest, ARecordThatDoesNotFitEndsTheSums) {
  Start();
  SumRecord record = GoodRecord();
  record.dst_offset_bytes = 4;
  Tell(record);
  ASSERT_TRUE(Await([this] { return words().ended.load() != 0; }));
  EXPECT_EQ(words().ended.load(), 2u);
  EXPECT_THAT(words().error, HasSubstr("outside of the gradient shards"));
  EXPECT_EQ(words().summed.load(), 0u);
}

TEST_F(TrainerSumsTest, UnmappableSlotsEndTheSumsWithTheReason) {
  Start();
  ring().sessions[1].store(0);
  slots_.resize(1);
  SumRecord record = GoodRecord();
  machine_.FailCall("cuMemImportFromShareableHandle", 1, CUDA_ERROR_INVALID_VALUE);
  record.ranks[0] = 2;
  slots_.push_back(*CudaSlab::Create(&driver_, 0, kBytes, "slots"));
  Tell(record);
  ASSERT_TRUE(Await([this] { return words().ended.load() != 0; }));
  EXPECT_EQ(words().ended.load(), 2u);
  EXPECT_THAT(words().error, HasSubstr("the gradient slots of rank 1"));
}

class WithoutMemoryOperations : public TrainerSumsTest {
 protected:
  static fake_cuda::MachineOptions Without() {
    fake_cuda::MachineOptions options;
    options.memops = false;
    options.delay_seed = 3;
    return options;
  }
  WithoutMemoryOperations() : TrainerSumsTest(Without()) {}
};

TEST_F(WithoutMemoryOperations, TheThreadWaitsForTheGpu) {
  Start();
  for (int i = 0; i < 20; ++i) {
    SumRecord record = GoodRecord();
    record.accumulate = i > 0 ? 1 : 0;
    Tell(record);
  }
  ASSERT_TRUE(AwaitSummed());
  EXPECT_EQ(Gradients()[kNumel - 1], 30.0f);
}

}  // namespace
}  // namespace shardd
