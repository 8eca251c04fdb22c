// Values of a slab that lies on two GPUs: each piece's bytes go through its own, and a GPU that hangs is the one that
// is given up.

#include "server/storage/job_slab.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/device/cuda/cuda_memory.h"
#include "tests/fakes/cuda/machine.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPage = int64_t{2} << 20;
constexpr int64_t kBytes = 3 * kPage;

class JobSlabTest : public ::testing::Test {
 protected:
  static fake_cuda::MachineOptions TwoGpus() {
    fake_cuda::MachineOptions options;
    options.gpus = 2;
    return options;
  }
  JobSlabTest() : machine_(TwoGpus()), driver_(fake_cuda::Table()) {
    (void)driver_->Init(0);
    for (int gpu = 0; gpu < 2; ++gpu) {
      gpus_.push_back(*CudaMemory::Create(driver_, gpu, /*limit=*/absl::Milliseconds(300)));
    }
    DeviceMemory* const first = gpus_[0].get();
    DeviceMemory* const second = gpus_[1].get();
    slab_ = std::make_unique<JobSlab>(
        *first->MakeSpreadSlab("slab", {{first, kPage}, {second, kPage}, {first, kPage}}, {first, second}));
  }
  // The copy, of bytes of both GPUs, while GPU 1 hangs: then of bytes of each alone.
  void ExpectTheSecondIsGivenUp(const std::function<absl::Status(int64_t first, int64_t size_bytes)>& copy) {
    ASSERT_TRUE(copy(0, kBytes).ok());
    machine_.HangGpu(1);
    const absl::Status status = copy(0, kBytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("copy between host and cuda:1: the GPU hangs"));
    EXPECT_TRUE(gpus_[1]->hangs());
    EXPECT_FALSE(gpus_[0]->hangs());
    EXPECT_TRUE(copy(kPage / 2, kPage / 2).ok()) << "of the first GPU";
    EXPECT_TRUE(copy(2 * kPage, kPage).ok()) << "of the first GPU";
    EXPECT_FALSE(copy(kPage, 1).ok());
  }

  fake_cuda::Machine machine_;
  const CudaDriver driver_;
  std::vector<std::unique_ptr<CudaMemory>> gpus_;
  std::unique_ptr<JobSlab> slab_;
  std::string bytes_ = std::string(static_cast<size_t>(kBytes), 'x');
};

TEST_F(JobSlabTest, BytesOverPieceEdgesComeBackUnchanged) {
  std::string want(static_cast<size_t>(kBytes), '\0');
  for (size_t i = 0; i < want.size(); ++i) want[i] = static_cast<char>(i * 7 + i / 4096);
  ASSERT_TRUE(slab_->Write(0, want.data(), kBytes).ok());
  const int64_t first = kPage - 5, count = kPage + 11;
  ASSERT_TRUE(slab_->Zero(first + 3, 4).ok());
  for (int i = 3; i < 7; ++i) want[static_cast<size_t>(first + i)] = '\0';
  ASSERT_TRUE(slab_->Read(first, bytes_.data(), count).ok());
  EXPECT_TRUE(
      bytes_.compare(0, static_cast<size_t>(count), want, static_cast<size_t>(first), static_cast<size_t>(count)) == 0);
}

TEST_F(JobSlabTest, AWriteIsTheGpusWhosePieceItIs) {
  ExpectTheSecondIsGivenUp([&](int64_t first, int64_t count) { return slab_->Write(first, bytes_.data(), count); });
}

TEST_F(JobSlabTest, SoIsARead) {
  ExpectTheSecondIsGivenUp([&](int64_t first, int64_t count) { return slab_->Read(first, bytes_.data(), count); });
}

TEST_F(JobSlabTest, SoIsAZero) {
  ExpectTheSecondIsGivenUp([&](int64_t first, int64_t count) { return slab_->Zero(first, count); });
}

}  // namespace
}  // namespace shardd
