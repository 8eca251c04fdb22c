// Turns of jobs on a GPU, on the fake driver.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/device/cuda/cuda_device.h"
#include "tests/server/device/fake_cuda_world.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;

constexpr absl::Duration kLimit = absl::Seconds(60);
constexpr absl::Duration kWatched = absl::Milliseconds(500);  // for what must not happen
constexpr int64_t kTurnBytes = 100'000;                       // of copies
constexpr int64_t kCopyBytes = int64_t{1} << 20;

class CudaTurnsTest : public ::testing::Test {
 protected:
  CudaTurnsTest()
      : from_(static_cast<char*>(world_.memory()->allocate(kCopyBytes, 64))),
        to_(static_cast<char*>(world_.memory()->allocate(kCopyBytes, 64))) {}

  void Submit(StreamId stream, std::string label, std::vector<DeviceOp> ops, WorkOwner owner) {
    ++submitted_;
    DeviceWork work;
    work.label = label;
    work.ops = std::move(ops);
    work.owner = owner;
    work.done = [this, label](absl::Status status) {
      EXPECT_TRUE(status.ok()) << status;
      absl::MutexLock lock(&mutex_);
      order_.push_back(label);
    };
    device_->Submit(stream, std::move(work));
  }
  std::vector<DeviceOp> Copies(int count) {
    return std::vector<DeviceOp>(static_cast<size_t>(count), CopyOp{from_, to_, kCopyBytes});
  }
  // All labels so far, in the order of their ends.
  std::vector<std::string> Order() {
    absl::MutexLock lock(&mutex_);
    const auto all = [this] { return order_.size() == submitted_; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&all), kLimit));
    return order_;
  }
  // Two jobs have used the device.
  void Share() {
    Submit(StreamId::kUnshard, "", {}, {1, 1});
    Submit(StreamId::kUnshard, "", {}, {2, 2});
    Order();
    order_.clear();
    submitted_ = 0;
  }
  // Lets `submit` queue work on a GPU that stands still, then lets it go; the order of ends.
  template <typename Queue>
  std::vector<std::string> OrderOf(Queue&& queue) {
    world_.machine().HangGpu(0);
    queue();
    world_.machine().HangGpu(0, false);
    return Order();
  }

  FakeCudaWorld world_{0, 1};
  char* const from_;
  char* const to_;
  absl::Mutex mutex_;
  std::vector<std::string> order_;
  size_t submitted_ = 0;
  std::unique_ptr<CudaDevice> device_ = world_.Make({.turn = absl::Nanoseconds(kTurnBytes / 25)});
};

TEST_F(CudaTurnsTest, JobsTakeTurnsWithinTheirWorks) {
  Share();
  EXPECT_THAT(OrderOf([&] {
                Submit(StreamId::kOptimizer, "large", Copies(200), {1, 1});
                Submit(StreamId::kOptimizer, "small", Copies(20), {2, 2});
                Submit(StreamId::kOptimizer, "smaller", Copies(5), {3, 3});
              }),
              ElementsAre("smaller", "small", "large"));
}

TEST_F(CudaTurnsTest, OneUserOfManyJobsIsOneUser) {
  Share();
  const std::vector<std::string> order = OrderOf([&] {
    for (uint64_t job = 0; job < 60; ++job) Submit(StreamId::kOptimizer, "many", Copies(4), {1, job});
    Submit(StreamId::kOptimizer, "one", Copies(20), {2, 100});
  });
  EXPECT_LT(std::find(order.begin(), order.end(), "one") - order.begin(), 15);
}

TEST_F(CudaTurnsTest, AJobAloneIssuesWholeOperations) {
  Submit(StreamId::kOptimizer, "alone", {}, {1, 1});
  Order();
  const int64_t before = world_.machine().Calls("cuMemcpyAsync");
  Submit(StreamId::kOptimizer, "alone", Copies(10), {1, 1});
  Order();
  EXPECT_EQ(world_.machine().Calls("cuMemcpyAsync") - before, 10);
}

TEST_F(CudaTurnsTest, AStreamThatJobsShareHasAFewTurnsQueued) {
  Share();
  const int64_t before = world_.machine().Calls("cuMemcpyAsync");
  int64_t queued = 0;
  OrderOf([&] {
    Submit(StreamId::kOptimizer, "large", Copies(200), {1, 1});
    // What comes later is issued all the same, so the issuer does not stand still in a call.
    Submit(StreamId::kUnshard, "other", Copies(200), {2, 2});
    const auto pieces = [&] { return queued = world_.machine().Calls("cuMemcpyAsync") - before; };
    absl::Time deadline = absl::Now() + kLimit;
    while (pieces() < 2 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
    // All 400 would be there in milliseconds.
    deadline = absl::Now() + kWatched;
    while (pieces() <= 8 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
  });
  EXPECT_GE(queued, 2) << "a piece of each stream";
  EXPECT_LE(queued, 8) << "pieces of a turn, in two streams";
}

TEST_F(CudaTurnsTest, PiecesHaveTheBitsOfTheWhole) {
  const size_t numel = (size_t{1} << 16) + 77;
  const auto make = [&](float from, float by) {
    auto* const p = static_cast<float*>(world_.memory()->allocate(numel * sizeof(float), 64));
    for (size_t i = 0; i < numel; ++i) p[i] = from + by * static_cast<float>(i % 1013);
    return p;
  };
  struct State {
    float *p, *g, *m, *v, *sum, *buf, *q;
    uint16_t *cast, *cast_of_q;
    Norm norm;
  };
  const auto run = [&](CudaDevice& device, bool shared) {
    State s{make(1, 0.01f), make(-1, 0.02f), make(0, 0.001f), make(0.5f, 0.001f),
            make(0, 0),     make(0, 0.01f),  make(2, 0.01f),  nullptr,
            nullptr,        Norm()};
    s.cast = static_cast<uint16_t*>(world_.memory()->allocate(numel * 2, 64));
    s.cast_of_q = static_cast<uint16_t*>(world_.memory()->allocate(numel * 2, 64));
    const DType f32 = v1::DTYPE_FLOAT32, bf16 = v1::DTYPE_BFLOAT16;
    const auto n = static_cast<int64_t>(numel);
    AdamWOp adamw = {{}, s.p, f32, s.g, s.m, s.v, s.cast, bf16, n};
    adamw.params.step = 3;
    adamw.params.lr = 0.1;
    adamw.params.eps = 1e-8;
    SgdOp sgd = {{}, s.q, f32, s.g, s.buf, nullptr, f32, n};
    sgd.params.lr = 0.1;
    sgd.params.momentum = 0.9;
    absl::Notification done;
    if (shared) device.Submit(StreamId::kUnshard, {"", {}, nullptr, nullptr, {2, 2}});
    device.Submit(StreamId::kOptimizer, {"ops",
                                         {ReduceOp{{s.p, s.g}, f32, v1::DTYPE_UNSPECIFIED, 0.5f, false, s.sum, n},
                                          NormOp{s.sum, n, &s.norm}, adamw, sgd, CastOp{s.q, f32, s.cast_of_q, bf16, n},
                                          ZeroOp{s.v, 4 * (n - 5)}, CopyOp{s.sum, s.m, 4 * (n - 3)}},
                                         [&](absl::Status status) {
                                           EXPECT_TRUE(status.ok()) << status;
                                           done.Notify();
                                         },
                                         nullptr,
                                         {1, 1}});
    EXPECT_TRUE(done.WaitForNotificationWithTimeout(kLimit));
    return s;
  };
  const State whole = run(*device_, /*shared=*/false);
  const auto other = world_.Make({.turn = absl::Nanoseconds(1)});
  const int64_t made = world_.machine().Calls("cuLaunchKernel");
  const State pieces = run(*other, /*shared=*/true);
  EXPECT_GT(world_.machine().Calls("cuLaunchKernel") - made, 60);
  const auto same = [&](const void* a, const void* b, size_t bytes) { return std::memcmp(a, b, bytes) == 0; };
  EXPECT_TRUE(same(whole.p, pieces.p, 4 * numel));
  EXPECT_TRUE(same(whole.m, pieces.m, 4 * numel));
  EXPECT_TRUE(same(whole.v, pieces.v, 4 * numel));
  EXPECT_TRUE(same(whole.q, pieces.q, 4 * numel));
  EXPECT_TRUE(same(whole.buf, pieces.buf, 4 * numel));
  EXPECT_TRUE(same(whole.sum, pieces.sum, 4 * numel));
  EXPECT_TRUE(same(whole.cast, pieces.cast, 2 * numel));
  EXPECT_TRUE(same(whole.cast_of_q, pieces.cast_of_q, 2 * numel));
  EXPECT_EQ(whole.norm.value(), pieces.norm.value());
}

}  // namespace
}  // namespace shardd
