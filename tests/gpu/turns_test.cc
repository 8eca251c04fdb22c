// How long a small job's work on a GPU takes beside the optimizer of a large one, whose works are always queued: jobs
// take turns of about a millisecond there (server/turns). Figures are printed; that jobs are served in turns is what
// tests/server/device/cuda_turns_test.cc shows.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/gpu/gpu.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/gpu/real_cuda_world.h"

namespace shardd {
namespace {

constexpr int64_t kNumel = int64_t{32} << 20;
constexpr int64_t kSmallBytes = int64_t{4} << 20;
constexpr int kUpdates = 256;  // of one work of the large job
constexpr int kRounds = 300;
constexpr absl::Duration kLimit = absl::Seconds(60);

class TurnsTest : public cuda::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (gpu_ == nullptr) return;
    for (auto& slab : large_) slab.emplace(gpu_->Allocate(kNumel * 4));
    for (auto& slab : small_) slab.emplace(gpu_->Allocate(kSmallBytes));
    for (auto& slab : large_) gpu_->Zero(slab->data(), kNumel * 4);
    gpu_->Wait();
    device_ = world_.Make({});
    ASSERT_NE(device_, nullptr);
  }
  void TearDown() override {
    stop_ = true;
    if (device_ != nullptr) device_->Shutdown();
  }
  void SubmitLarge() {
    DeviceWork work;
    work.label = "update of the large job";
    work.owner = {1000, 1};
    const auto at = [&](int i) { return static_cast<float*>(large_[i]->data()); };
    work.ops.assign(kUpdates, AdamWOp{cuda::UsualAdamW(), at(0), v1::DTYPE_FLOAT32, at(1), at(2), at(3), nullptr,
                                      v1::DTYPE_UNSPECIFIED, kNumel});
    work.done = [this](const absl::Status& status) {
      if (status.ok()) ++updates_;
      if (status.ok() && !stop_) SubmitLarge();
    };
    device_->Submit(StreamId::kOptimizer, std::move(work));
  }
  // Of one small copy after the other, in microseconds.
  std::vector<double> Small(StreamId stream) {
    std::vector<double> took;
    for (int round = 0; round < kRounds; ++round) {
      auto ended = std::make_shared<absl::Notification>();
      DeviceWork work;
      work.label = "copy of the small job";
      work.owner = {2000, 2};
      work.ops = {CopyOp{small_[0]->data(), small_[1]->data(), kSmallBytes}};
      work.done = [ended](const absl::Status& status) {
        EXPECT_TRUE(status.ok()) << status;
        ended->Notify();
      };
      const auto begin = std::chrono::steady_clock::now();
      device_->Submit(stream, std::move(work));
      EXPECT_TRUE(ended->WaitForNotificationWithTimeout(kLimit));
      took.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    }
    std::sort(took.begin(), took.end());
    return took;
  }
  void Print(const char* what, const std::vector<double>& us) {
    std::printf("[ TURNS    ] %-40s p50 %8.1f us, p99 %8.1f us, max %8.1f us\n", what, us[us.size() / 2],
                us[us.size() * 99 / 100], us.back());
  }

  std::optional<CudaSlab> large_[4];
  std::optional<CudaSlab> small_[2];
  RealCudaWorld world_;
  std::atomic<bool> stop_{false};
  std::atomic<int> updates_{0};
  std::unique_ptr<CudaDevice> device_;
};

TEST_F(TurnsTest, ASmallJobBesideALargeOnesOptimizer) {
  Print("alone", Small(StreamId::kOptimizer));
  SubmitLarge();
  SubmitLarge();
  Print("beside it, another stream", Small(StreamId::kUnshard));
  Print("beside it, its stream", Small(StreamId::kOptimizer));
  const auto begin = std::chrono::steady_clock::now();
  const int before = updates_;
  while (updates_ < before + 4) absl::SleepFor(absl::Milliseconds(5));
  std::printf("[ TURNS    ] the large job's work of %d updates: %.1f ms\n", kUpdates,
              std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count() / 4);
  EXPECT_GT(updates_, 0);
}

}  // namespace
}  // namespace shardd
