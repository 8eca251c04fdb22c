// What only the CPU device promises: turns of jobs, preference among streams, slices, thread names.

#include "server/device/cpu/cpu_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;

constexpr absl::Duration kLimit = absl::Seconds(60);

class CpuDeviceTest : public ::testing::Test {
 protected:
  // Stops the device in a callback, lets `submit` queue work behind it, runs it all; the order of completions.
  template <typename Submit>
  std::vector<std::string> OrderOf(Submit&& submit) {
    absl::Notification entered, opened;
    device_.Submit(StreamId::kUnshard, {"gate", {}, [&](absl::Status) {
                                          entered.Notify();
                                          opened.WaitForNotificationWithTimeout(kLimit);
                                        }});
    entered.WaitForNotification();
    submit();
    opened.Notify();
    absl::MutexLock lock(&mutex_);
    const auto all = [this] { return order_.size() == submitted_; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&all), kLimit));
    return order_;
  }
  void Submit(StreamId stream, std::string label, std::vector<DeviceOp> ops = {}, WorkOwner owner = {}) {
    ++submitted_;
    DeviceWork work;
    work.label = label;
    work.ops = std::move(ops);
    work.owner = owner;
    work.done = [this, label](absl::Status) {
      absl::MutexLock lock(&mutex_);
      order_.push_back(label);
    };
    device_.Submit(stream, std::move(work));
  }

  absl::Mutex mutex_;
  std::vector<std::string> order_;
  size_t submitted_ = 0;
  CpuDevice device_{"cpu:7"};
};

TEST_F(CpuDeviceTest, UnshardGoesFirstAndTheOptimizerLast) {
  EXPECT_THAT(OrderOf([&] {
                Submit(StreamId::kOptimizer, "optimizer");
                Submit(StreamId::kPostBackward, "post_backward");
                Submit(StreamId::kUnshard, "unshard");
              }),
              ElementsAre("unshard", "post_backward", "optimizer"));
}

TEST_F(CpuDeviceTest, AStreamOfLowPreferenceIsNotStarved) {
  const std::vector<std::string> order = OrderOf([&] {
    for (int i = 0; i < 200; ++i) Submit(StreamId::kUnshard, "unshard");
    Submit(StreamId::kOptimizer, "optimizer");
    Submit(StreamId::kPostBackward, "post_backward");
  });
  const auto position = [&](const char* label) { return std::find(order.begin(), order.end(), label) - order.begin(); };
  EXPECT_LT(position("optimizer"), 50);
  EXPECT_LT(position("post_backward"), 50);
}

TEST_F(CpuDeviceTest, AnUnshardDoesNotWaitForAWholeUpdate) {
  const int64_t numel = int64_t{3} << 20;
  std::vector<float> p(static_cast<size_t>(numel), 1.0f), g = p, m = p, v = p;
  const AdamWOp update = {{1e-3, 0.9, 0.99, 1e-8, 0, 1, 1},
                          p.data(),
                          v1::DTYPE_FLOAT32,
                          g.data(),
                          m.data(),
                          v.data(),
                          nullptr,
                          v1::DTYPE_UNSPECIFIED,
                          numel};
  // Many seconds of work; the shutdown below ends it.
  Submit(StreamId::kOptimizer, "update", std::vector<DeviceOp>(5000, update));
  const absl::Time deadline = absl::Now() + kLimit;
  while (device_.Status()[2].current.empty() && absl::Now() < deadline) {
  }
  absl::Notification unsharded;
  device_.Submit(StreamId::kUnshard, {"unshard", {}, [&](absl::Status) { unsharded.Notify(); }});
  EXPECT_TRUE(unsharded.WaitForNotificationWithTimeout(kLimit));
  EXPECT_EQ(device_.Status()[2].current, "update");
  device_.Shutdown();
}

// Copies of a few slices each.
std::vector<DeviceOp> Copies(const std::vector<char>& from, std::vector<char>& to, int count) {
  return std::vector<DeviceOp>(static_cast<size_t>(count),
                               CopyOp{from.data(), to.data(), static_cast<int64_t>(from.size())});
}

TEST_F(CpuDeviceTest, JobsTakeTurnsWithinTheirWorks) {
  const std::vector<char> from(16 << 20, 1);
  std::vector<char> to(from.size());
  constexpr int kCopies = 50;
  EXPECT_THAT(OrderOf([&] {
                // A stream is preferred within a job alone.
                Submit(StreamId::kUnshard, "large", Copies(from, to, 8 * kCopies), {1, 1});
                Submit(StreamId::kOptimizer, "small", Copies(from, to, kCopies), {1, 2});
                Submit(StreamId::kOptimizer, "smaller", Copies(from, to, kCopies / 4), {1, 3});
              }),
              ElementsAre("smaller", "small", "large"));
}

TEST_F(CpuDeviceTest, OneJobOfManyWorksIsOneJob) {
  const std::vector<char> from(16 << 20, 1);
  std::vector<char> to(from.size());
  const std::vector<std::string> order = OrderOf([&] {
    for (int i = 0; i < 100; ++i) Submit(static_cast<StreamId>(i % kStreamCount), "many", Copies(from, to, 4), {1, 1});
    Submit(StreamId::kOptimizer, "one", Copies(from, to, 20), {1, 2});
  });
  EXPECT_LT(std::find(order.begin(), order.end(), "one") - order.begin(), 30);
}

TEST_F(CpuDeviceTest, OneUserOfManyJobsIsOneUser) {
  const std::vector<char> from(16 << 20, 1);
  std::vector<char> to(from.size());
  const std::vector<std::string> order = OrderOf([&] {
    for (uint64_t job = 0; job < 60; ++job) {
      Submit(StreamId::kUnshard, "many", Copies(from, to, 4), {1, job});
    }
    Submit(StreamId::kOptimizer, "one", Copies(from, to, 20), {2, 100});
  });
  EXPECT_LT(std::find(order.begin(), order.end(), "one") - order.begin(), 15);
}

// Whoever has waited does not take the device for as long as it has waited.
TEST_F(CpuDeviceTest, ALateJobIsServedAtOnceAndThenShares) {
  const std::vector<char> from(16 << 20, 1);
  std::vector<char> to(from.size());
  std::vector<char> to_late(from.size());
  Submit(StreamId::kOptimizer, "early", Copies(from, to, 200), {1, 1});
  const absl::Time deadline = absl::Now() + kLimit;
  while (device_.Status()[2].busy_us < 100'000 && absl::Now() < deadline) {
  }
  Submit(StreamId::kOptimizer, "late", {}, {1, 2});
  Submit(StreamId::kOptimizer, "as long", Copies(from, to_late, 400), {1, 2});
  absl::MutexLock lock(&mutex_);
  const auto all = [this] { return order_.size() == submitted_; };
  EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&all), kLimit));
  EXPECT_THAT(order_, ElementsAre("late", "early", "as long"));
}

TEST_F(CpuDeviceTest, TheThreadHasTheDevicesName) {
  char name[16] = {};
  absl::Notification done;
  device_.Submit(StreamId::kUnshard, {"name", {}, [&](absl::Status) {
                                        pthread_getname_np(pthread_self(), name, sizeof(name));
                                        done.Notify();
                                      }});
  done.WaitForNotification();
  EXPECT_STREQ(name, "cpu:7");
  EXPECT_EQ(device_.name(), "cpu:7");
}

}  // namespace
}  // namespace shardd
