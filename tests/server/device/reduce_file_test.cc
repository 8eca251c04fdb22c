// Sums whose pages were given back are written through the file that they are in: same results, nothing else touched.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "common/shm/slab.h"
#include "common/tensor/kernels.h"
#include "server/device/cpu/cpu_ops.h"

namespace shardd {
namespace {

constexpr int64_t kNumel = int64_t{1} << 18;  // 1 MiB: 256 pages

class ReduceFileTest : public ::testing::Test {
 protected:
  ReduceFileTest() : a_(kNumel), b_(kNumel), want_(kNumel) {
    for (int64_t i = 0; i < kNumel; ++i) {
      a_[i] = static_cast<float>(i % 1013) - 500;
      b_[i] = static_cast<float>(i % 77);
    }
    slab_ = *Slab::Create("gradients", SlabBacking::kSealedMemfd, kNumel * 4);
    std::fill_n(data(), kNumel, 7.0f);
  }
  float* data() { return slab_->At<float>(0); }
  int64_t PagesThere() {
    struct stat object {};
    EXPECT_EQ(fstat(slab_->fd(), &object), 0);
    return object.st_blocks * 512 / 4096;
  }
  void GiveBack(int64_t first_page, int64_t pages) {
    ASSERT_EQ(madvise(slab_->At<char>(first_page * 4096), static_cast<size_t>(pages * 4096), MADV_REMOVE), 0);
  }
  // Elements [first, first + numel) of the sum of both.
  void Reduce(int64_t first, int64_t numel, bool accumulate = false) {
    ReduceOp op{{a_.data() + first, b_.data() + first},
                v1::DTYPE_FLOAT32,
                v1::DTYPE_UNSPECIFIED,
                0.5f,
                accumulate,
                data() + first,
                numel};
    op.dst_file = slab_->fd();
    op.dst_file_offset_bytes = first * 4;
    RunCpuOp(op, 0, numel);
    const void* sources[] = {a_.data() + first, b_.data() + first};
    ReduceSources(sources, v1::DTYPE_FLOAT32, v1::DTYPE_UNSPECIFIED, v1::DTYPE_UNSPECIFIED, 0.5f, false,
                  want_.data() + first, numel);
  }
  // Those of the last Reduce are right; all others are `rest`.
  void ExpectSum(int64_t first, int64_t numel, float rest, float before = 0) {
    for (int64_t i = 0; i < kNumel; ++i) {
      const bool inside = i >= first && i < first + numel;
      ASSERT_EQ(data()[i], inside ? want_[i] + before : rest) << "element " << i;
    }
  }

  std::vector<float> a_, b_, want_;
  std::unique_ptr<Slab> slab_;
};

TEST_F(ReduceFileTest, PagesThatWereGivenBackComeBackWithTheSum) {
  GiveBack(0, 256);
  ASSERT_EQ(PagesThere(), 0);
  Reduce(0, kNumel);
  EXPECT_EQ(PagesThere(), 256);
  ExpectSum(0, kNumel, 0);
}

TEST_F(ReduceFileTest, NeighboursInThePagesAtBothEndsAreKept) {
  GiveBack(3, 200);
  const int64_t first = 2 * 1024 + 100;  // in the page before the hole
  const int64_t numel = 202 * 1024;      // to the page behind it
  Reduce(first, numel);
  EXPECT_EQ(PagesThere(), 256);
  ExpectSum(first, numel, 7);
}

TEST_F(ReduceFileTest, AHoleWhoseMiddleIsThereIsFilledByStores) {
  GiveBack(0, 100);
  Reduce(0, kNumel);
  ExpectSum(0, kNumel, 0);
}

TEST_F(ReduceFileTest, WhatIsAddedToIsReadFirst) {
  GiveBack(0, 256);  // reads zero
  Reduce(0, kNumel, /*accumulate=*/true);
  ExpectSum(0, kNumel, 0);
  std::fill_n(data(), kNumel, 7.0f);
  Reduce(0, kNumel, /*accumulate=*/true);
  ExpectSum(0, kNumel, 0, 7);
}

TEST_F(ReduceFileTest, AFileThatCannotBeWrittenIsWrittenByStores) {
  GiveBack(0, 256);
  const absl::StatusOr<UniqueFd> read_only = slab_->ReadOnlyFd();
  ASSERT_TRUE(read_only.ok());
  ReduceOp op{{a_.data()}, v1::DTYPE_FLOAT32, v1::DTYPE_UNSPECIFIED, 1, false, data(), kNumel};
  op.dst_file = read_only->get();
  RunCpuOp(op, 0, kNumel);
  want_ = a_;
  ExpectSum(0, kNumel, 0);
}

}  // namespace
}  // namespace shardd
