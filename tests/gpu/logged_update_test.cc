// What it costs that an update can be completed by another process: AdamW whose old values are copied to another place
// of the GPU, a piece at a time, beside AdamW alone, both in this run. Rounds of each alternate, the medians count.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "common/tensor/update_log.h"
#include "server/storage/kept_on_gpus.h"
#include "server/storage/old_values_plan.h"
#include "tests/gpu/gpu.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/gpu/real_cuda_world.h"

namespace shardd {
namespace {

constexpr int64_t kNumel = int64_t{128} << 20;  // 2 GiB of four arrays: nothing of it stays in a cache
constexpr int kRounds = 7;
constexpr double kLeast = 0.4;  // by the bytes moved 28 / 52

class LoggedUpdateTest : public cuda::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (gpu_ == nullptr) return;
    for (int i = 0; i < 4; ++i) {
      arrays_.push_back(gpu_->Allocate(kNumel * 4));
      gpu_->Zero(arrays_.back().data(), kNumel * 4);
    }
    place_ = gpu_->Allocate(UpdateLog::kArrays * UpdateLog::kMaxElementBytes * kLoggedPieceNumel);
    gpu_->Wait();
    log_ = new (world_.memory()->allocate(sizeof(UpdateLog), 64)) UpdateLog();
    device_ = world_.Make({});
  }
  void TearDown() override {
    if (device_ != nullptr) device_->Shutdown();
  }
  double Seconds(Logged logged) {
    const auto at = [&](size_t i) { return static_cast<float*>(arrays_[i].data()); };
    absl::Notification ended;
    DeviceWork work;
    work.label = "update";
    work.ops = {AdamWOp{cuda::UsualAdamW(), at(0), v1::DTYPE_FLOAT32, at(1), at(2), at(3), nullptr,
                        v1::DTYPE_UNSPECIFIED, kNumel, logged}};
    work.done = [&ended](const absl::Status& status) {
      EXPECT_TRUE(status.ok()) << status;
      ended.Notify();
    };
    const auto begin = std::chrono::steady_clock::now();
    device_->Submit(StreamId::kOptimizer, std::move(work));
    ended.WaitForNotification();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  RealCudaWorld world_;
  std::vector<CudaSlab> arrays_;
  CudaSlab place_;
  UpdateLog* log_ = nullptr;
  std::unique_ptr<CudaDevice> device_;
};

TEST_F(LoggedUpdateTest, CostsWhatItsBytesCost) {
  std::vector<double> plain, logged;
  for (int round = 0; round < kRounds; ++round) {
    plain.push_back(Seconds({}));
    log_->Begin(round + 1);
    logged.push_back(Seconds({log_, 0, {static_cast<char*>(place_.data()), kLoggedPieceNumel}}));
    EXPECT_EQ(log_->done(round + 1), kNumel) << "the words of the stream have come to the host";
  }
  std::sort(plain.begin(), plain.end());
  std::sort(logged.begin(), logged.end());
  const double share = plain[kRounds / 2] / logged[kRounds / 2];
  std::printf("| AdamW of %lld Mi elements | %.2f ms | logged %.2f ms | %.2f of its speed |\n",
              static_cast<long long>(kNumel >> 20), plain[kRounds / 2] * 1e3, logged[kRounds / 2] * 1e3, share);
  EXPECT_GE(share, kLeast);
}

}  // namespace
}  // namespace shardd
