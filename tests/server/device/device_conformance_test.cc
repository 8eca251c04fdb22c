// What every Device must do, whatever it runs on. A new implementation joins with one line in DeviceKinds().

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/shm/trace_ring.h"
#include "server/device/device.h"
#include "tests/server/device/device_world.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr absl::Duration kLimit = absl::Seconds(60);

// What `done` callbacks said, in the order in which they ran.
class Log {
 public:
  std::function<void(absl::Status)> Entry(std::string name) {
    return [this, name = std::move(name)](absl::Status status) {
      absl::MutexLock lock(&mutex_);
      names_.push_back(name);
      statuses_.push_back(std::move(status));
    };
  }
  // The names once there are `count`.
  std::vector<std::string> WaitFor(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto enough = [&] { return names_.size() >= count; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&enough), kLimit)) << names_.size() << " of " << count;
    return names_;
  }
  std::vector<absl::Status> statuses() {
    absl::MutexLock lock(&mutex_);
    return statuses_;
  }

 private:
  absl::Mutex mutex_;
  std::vector<std::string> names_;
  std::vector<absl::Status> statuses_;
};

template <typename A, typename B>
bool Same(const A& a, const B& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

class DeviceTest : public ::testing::TestWithParam<DeviceKind> {
 protected:
  template <typename T>
  using Vec = std::pmr::vector<T>;  // that the device reaches
  template <typename T>
  Vec<T> Of(std::initializer_list<T> values) {
    return Vec<T>(values, world_->memory());
  }
  Vec<float> Floats(size_t numel, float value = 0) { return Vec<float>(numel, value, world_->memory()); }
  Vec<float> Copy(const Vec<float>& values) { return Vec<float>(values, world_->memory()); }
  template <typename T>
  T& New(T value) {
    auto kept = std::make_shared<Vec<T>>(1, value, world_->memory());
    kept_.push_back(kept);
    return kept->front();
  }

  void SetUp() override {
    if (const std::string why_not = world_->why_not(); !why_not.empty()) GTEST_SKIP() << why_not;
    devices_ = world_->MakeAll();
    device_ = devices_.front().get();
  }
  void TearDown() override { gate_.Release(); }

  absl::Status Run(DeviceWork work, StreamId stream = StreamId::kUnshard) {
    absl::Notification notification;
    absl::Status result;
    work.done = [&](absl::Status status) {
      result = std::move(status);
      notification.Notify();
    };
    device_->Submit(stream, std::move(work));
    EXPECT_TRUE(notification.WaitForNotificationWithTimeout(kLimit));
    return result;
  }
  absl::Status RunOp(DeviceOp op) {
    DeviceWork work;
    work.label = "one operation";
    work.ops.emplace_back(std::move(op));
    return Run(std::move(work));
  }

  // Holds the device where it is until Release, so that what is submitted meanwhile queues up: a callback is the one
  // place where a test can stop a device.
  class Gate {
   public:
    void Close(Device* device, StreamId stream) {
      device->Submit(stream, {"gate", {}, [this](absl::Status) {
                                entered_.Notify();
                                opened_.WaitForNotificationWithTimeout(kLimit);
                              }});
      ASSERT_TRUE(entered_.WaitForNotificationWithTimeout(kLimit));
    }
    void Release() {
      if (!opened_.HasBeenNotified()) opened_.Notify();
    }

   private:
    absl::Notification entered_, opened_;
  };

  const std::unique_ptr<DeviceWorld> world_ = GetParam().make();
  std::vector<std::shared_ptr<void>> kept_;  // what New has made
  Gate gate_;                                // outlives the devices
  std::vector<std::unique_ptr<Device>> devices_;
  Device* device_ = nullptr;
};

TEST_P(DeviceTest, TimedWorkSaysWhenItRanWithoutOverlapping) {
  const Vec<float> from = Floats(1 << 20, 1);
  Vec<float> to = Floats(1 << 20);
  const int64_t begin_ns = TraceNowNs();
  std::vector<std::shared_ptr<WorkTiming>> timings;
  Log log;
  for (int i = 0; i < 3; ++i) {
    DeviceWork work;
    work.label = "copy";
    work.ops.emplace_back(CopyOp{from.data(), to.data(), static_cast<int64_t>(from.size() * sizeof(float))});
    work.timing = std::make_shared<WorkTiming>();
    work.done = log.Entry("copy");
    timings.push_back(work.timing);
    device_->Submit(StreamId::kUnshard, std::move(work));
  }
  log.WaitFor(3);
  const int64_t end_ns = TraceNowNs();
  int64_t before_ns = begin_ns;
  for (const auto& timing : timings) {
    EXPECT_GE(timing->begin_ns, before_ns);
    EXPECT_GT(timing->end_ns, timing->begin_ns);
    before_ns = timing->end_ns;
  }
  EXPECT_LE(before_ns, end_ns);
}

TEST_P(DeviceTest, CopyAndCastWriteTheirDestination) {
  const Vec<float> src = Of<float>({1.5f, -2, 3});
  Vec<float> copy = Floats(3);
  Vec<uint16_t> bf16 = Of<uint16_t>({0, 0, 0});
  ASSERT_TRUE(RunOp(CopyOp{src.data(), copy.data(), 12}).ok());
  EXPECT_EQ(copy, src);
  ASSERT_TRUE(RunOp(CastOp{src.data(), v1::DTYPE_FLOAT32, bf16.data(), v1::DTYPE_BFLOAT16, 3}).ok());
  EXPECT_THAT(bf16, ElementsAre(0x3fc0, 0xc000, 0x4040));
}

TEST_P(DeviceTest, ReduceAddsScalesAndAccumulates) {
  const Vec<float> a = Of<float>({1, 2}), b = Of<float>({3, 4});
  Vec<float> dst = Of<float>({100, 100});
  ReduceOp op{{a.data(), b.data()}, v1::DTYPE_FLOAT32, v1::DTYPE_UNSPECIFIED, 0.5f, false, dst.data(), 2};
  ASSERT_TRUE(RunOp(op).ok());
  EXPECT_THAT(dst, ElementsAre(2, 3));
  op.accumulate = true;
  ASSERT_TRUE(RunOp(op).ok());
  EXPECT_THAT(dst, ElementsAre(4, 6));
}

TEST_P(DeviceTest, ReduceRoundsTheResultAndWhatItIsAddedTo) {
  const Vec<float> a = Of<float>({1}), b = Of<float>({0x1p-8f});  // 1 + 2^-8 lies between two numbers of bf16
  Vec<float> dst = Of<float>({0x1p-9f});
  ReduceOp op{{a.data(), b.data()}, v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16, 1, true, dst.data(), 1};
  ASSERT_TRUE(RunOp(op).ok());
  EXPECT_THAT(dst, ElementsAre(1 + 0x1p-9f));
  op.keep = v1::DTYPE_BFLOAT16;
  ASSERT_TRUE(RunOp(op).ok());
  EXPECT_THAT(dst, ElementsAre(2));
  op.accumulate = false;
  op.reduce_dtype = v1::DTYPE_FLOAT32;
  op.keep = v1::DTYPE_FLOAT32;
  ASSERT_TRUE(RunOp(op).ok());
  EXPECT_THAT(dst, ElementsAre(1 + 0x1p-8f));
}

TEST_P(DeviceTest, ReduceOfOneSourceMayBeInItsPlace) {
  constexpr int64_t kNumel = (int64_t{1} << 20) + 5;  // written past the cache, and no whole number of blocks
  Vec<float> sums = Floats(kNumel), want = Floats(kNumel);
  for (int64_t i = 0; i < kNumel; ++i) {
    sums[static_cast<size_t>(i)] = static_cast<float>(i % 1013) * (1 + 0x1p-9f);
    const float scaled = sums[static_cast<size_t>(i)] * (1.0f / 3);
    uint16_t narrow = 0;
    Cast(&scaled, v1::DTYPE_FLOAT32, &narrow, v1::DTYPE_BFLOAT16, 1);
    Cast(&narrow, v1::DTYPE_BFLOAT16, &want[static_cast<size_t>(i)], v1::DTYPE_FLOAT32, 1);
  }
  // Also from an address that is aligned to nothing but the element.
  for (const int64_t first : {int64_t{0}, int64_t{1}}) {
    Vec<float> in_place = Floats(kNumel);  // a copy would be elsewhere
    std::copy(sums.begin(), sums.end(), in_place.begin());
    ReduceOp op{{in_place.data() + first}, v1::DTYPE_FLOAT32, v1::DTYPE_FLOAT32, 1.0f / 3, false,
                in_place.data() + first,   kNumel - first};
    op.keep = v1::DTYPE_BFLOAT16;
    ASSERT_TRUE(RunOp(op).ok());
    for (int64_t i = first; i < kNumel; ++i) {
      ASSERT_EQ(in_place[static_cast<size_t>(i)], want[static_cast<size_t>(i)]) << i;
    }
  }
}

TEST_P(DeviceTest, ZeroWritesItsRangeAndNothingElse) {
  Vec<float> values = Floats(5, 7);
  ASSERT_TRUE(RunOp(ZeroOp{values.data() + 1, 3 * sizeof(float)}).ok());
  EXPECT_THAT(values, ElementsAre(7, 0, 0, 0, 7));
}

TEST_P(DeviceTest, NormsOfOneWorkAddUp) {
  const Vec<float> a = Of<float>({3, -4}), b = Of<float>({12});
  for (const auto& [order, want] : std::vector<std::pair<double, double>>{{1, 19}, {2, 13}, {INFINITY, 12}}) {
    Norm norm(order);
    DeviceWork work;
    work.ops = {NormOp{a.data(), 2, &norm}, NormOp{b.data(), 1, &norm}};
    ASSERT_TRUE(Run(std::move(work)).ok());
    EXPECT_EQ(norm.value(), want) << order;
  }
}

TEST_P(DeviceTest, OptimizersUpdateParametersAndTheirCastCopy) {
  float &p = New(1.0f), &g = New(1.0f), &m = New(0.0f), &v = New(0.0f), &buffer = New(NAN);
  uint16_t& cast = New(uint16_t{0});
  ASSERT_TRUE(
      RunOp(AdamWOp{{0.5, 0, 0, 0, 0, 1, 1}, &p, v1::DTYPE_FLOAT32, &g, &m, &v, &cast, v1::DTYPE_BFLOAT16, 1}).ok());
  EXPECT_EQ(p, 0.5f);
  EXPECT_EQ(cast, 0x3f00);
  ASSERT_TRUE(
      RunOp(SgdOp{{0.25, 0.5, 0, 0, false, true, 1}, &p, v1::DTYPE_FLOAT32, &g, &buffer, &cast, v1::DTYPE_BFLOAT16, 1})
          .ok());
  EXPECT_EQ(p, 0.25f);
  EXPECT_EQ(buffer, 1.0f);
  EXPECT_EQ(cast, 0x3e80);
  RuleOp lion = {{UpdateRule::kLion, 0.125}, &p, v1::DTYPE_FLOAT32, &g, &m, nullptr, &cast, v1::DTYPE_BFLOAT16, 1};
  ASSERT_TRUE(RunOp(lion).ok());
  EXPECT_EQ(p, 0.125f);
  EXPECT_EQ(m, 1.0f);
  EXPECT_EQ(cast, 0x3e00);
}

// Larger than anything a device would do in one go.
TEST_P(DeviceTest, LargeOperationsGiveTheResultOfOneKernelCall) {
  const int64_t numel = (int64_t{5} << 20) / 2 + 77;
  Vec<float> a = Floats(static_cast<size_t>(numel)), b = Copy(a), got = Copy(a);
  std::vector<float> want(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<float>(i % 1000) - 500;
    b[i] = static_cast<float>(i % 77);
  }
  DeviceWork work;
  Norm norm;
  Vec<float> p = Copy(a), m = Floats(a.size()), v = Copy(m);
  std::vector<float> p2(a.begin(), a.end()), m2(a.size()), v2(a.size());
  const AdamWParams params = {1e-2, 0.9, 0.99, 1e-8, 0.1, 1, 1};
  Vec<uint16_t> cast(a.size(), world_->memory());
  std::vector<uint16_t> cast2(a.size());
  work.ops = {ReduceOp{{a.data(), b.data()}, v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16, 0.5f, false, got.data(), numel},
              NormOp{got.data(), numel, &norm},
              AdamWOp{params, p.data(), v1::DTYPE_FLOAT32, got.data(), m.data(), v.data(), cast.data(),
                      v1::DTYPE_BFLOAT16, numel}};
  ASSERT_TRUE(Run(std::move(work), StreamId::kOptimizer).ok());
  const void* sources[] = {a.data(), b.data()};
  ReduceSources(sources, v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT32, 0.5f, false, want.data(), numel);
  EXPECT_TRUE(Same(got, want));
  EXPECT_NEAR(norm.value(), std::sqrt(SquaredNorm(want.data(), numel)), 1e-12 * norm.value());
  AdamWUpdate(params, p2.data(), v1::DTYPE_FLOAT32, want.data(), m2.data(), v2.data(), cast2.data(), v1::DTYPE_BFLOAT16,
              numel);
  EXPECT_TRUE(Same(p, p2) && Same(m, m2) && Same(v, v2) && Same(cast, cast2));
  Vec<float> copy = Floats(a.size());
  ASSERT_TRUE(RunOp(CopyOp{a.data(), copy.data(), numel * 4}).ok());
  EXPECT_TRUE(copy == a);
}

TEST_P(DeviceTest, WorkOfOneStreamRunsInOrder) {
  Log log;
  Vec<float> chain = Floats(101);
  chain[0] = 42;
  std::vector<std::string> want;
  for (size_t i = 0; i < 100; ++i) {
    DeviceWork work;
    work.ops.emplace_back(CopyOp{&chain[i], &chain[i + 1], 4});
    work.done = log.Entry(std::to_string(i));
    want.push_back(std::to_string(i));
    device_->Submit(StreamId::kPostBackward, std::move(work));
  }
  EXPECT_EQ(log.WaitFor(100), want);
  EXPECT_EQ(chain.back(), 42.0f);
}

TEST_P(DeviceTest, OperationsRunInOrderAndDoneComesAfterAll) {
  float &a = New(7.0f), &b = New(0.0f), &c = New(0.0f);
  DeviceWork work;
  work.ops = {CopyOp{&a, &b, 4}, CopyOp{&b, &c, 4}};
  ASSERT_TRUE(Run(std::move(work)).ok());
  EXPECT_EQ(c, 7.0f);
}

TEST_P(DeviceTest, WorkWithoutOperationsIsDone) { EXPECT_TRUE(Run({}).ok()); }

TEST_P(DeviceTest, OperationsOnNothingAreFine) {
  EXPECT_TRUE(RunOp(CopyOp{nullptr, nullptr, 0}).ok());
  EXPECT_TRUE(RunOp(ReduceOp{{}, v1::DTYPE_FLOAT32, v1::DTYPE_UNSPECIFIED, 1, false, nullptr, 0}).ok());
}

TEST_P(DeviceTest, DoneMaySubmitMoreWork) {
  Log log;
  device_->Submit(StreamId::kUnshard, {"first", {}, [&](absl::Status) {
                                         device_->Submit(StreamId::kUnshard, {"second", {}, log.Entry("second")});
                                         device_->Submit(StreamId::kOptimizer, {"third", {}, log.Entry("third")});
                                       }});
  EXPECT_THAT(log.WaitFor(2), UnorderedElementsAre("second", "third"));  // of two streams, so in any order
}

TEST_P(DeviceTest, AMalformedOperationFailsOnlyItsWorkByLabel) {
  float &a = New(1.0f), &b = New(0.0f);
  DeviceWork work;
  work.label = "reduce layers.3 step 12";
  work.ops = {ReduceOp{{&a}, v1::DTYPE_INT32, v1::DTYPE_UNSPECIFIED, 1, false, &b, 1}, CopyOp{&a, &b, 4}};
  const absl::Status status = Run(std::move(work));
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("reduce layers.3 step 12"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("int32"));
  EXPECT_EQ(b, 0.0f) << "operations after the malformed one must not run";
  EXPECT_TRUE(RunOp(CopyOp{&a, &b, 4}).ok()) << "the stream goes on";
  EXPECT_EQ(b, 1.0f);
}

TEST_P(DeviceTest, EachKindOfMalformedOperationIsRefused) {
  float x = 0;
  Norm* no_result = nullptr;
  const DType f32 = v1::DTYPE_FLOAT32;
  MuonMatrix one_by_one;
  one_by_one.rows = one_by_one.cols = 1, one_by_one.p = &x, one_by_one.param_dtype = f32, one_by_one.g = &x;
  AdafactorTensor one_number;
  one_number.p = &x, one_number.param_dtype = f32, one_number.g = &x;
  const std::vector<DeviceOp> malformed = {
      CopyOp{nullptr, &x, 4},
      CopyOp{&x, &x, -1},
      ZeroOp{nullptr, 4},
      CastOp{&x, v1::DTYPE_INT64, &x, f32, 1},
      CastOp{&x, v1::DTYPE_UNSPECIFIED, &x, v1::DTYPE_UNSPECIFIED, 1},
      ReduceOp{{}, f32, v1::DTYPE_UNSPECIFIED, 1, false, &x, 1},
      ReduceOp{{nullptr}, f32, v1::DTYPE_UNSPECIFIED, 1, false, &x, 1},
      ReduceOp{{&x}, f32, v1::DTYPE_FLOAT64, 1, false, &x, 1},
      ReduceOp{{&x}, f32, f32, 1, false, &x, 1, v1::DTYPE_FLOAT64},
      NormOp{&x, 1, no_result},
      AdamWOp{{1, 0, 0, 0, 0, 0, 1}, &x, f32, &x, &x, &x, nullptr, f32, 1},  // step 0
      AdamWOp{{1, 0, 0, 0, 0, 1, 1}, &x, f32, &x, nullptr, &x, nullptr, f32, 1},
      AdamWOp{{1, 0, 0, 0, 0, 1, 1}, &x, v1::DTYPE_FLOAT64, &x, &x, &x, nullptr, f32, 1},
      SgdOp{{1, 0.9, 0, 0, false, true, 1}, &x, f32, &x, nullptr, nullptr, f32, 1},
      SgdOp{{1, 0, 0, 0, false, true, 1}, &x, f32, &x, nullptr, &x, v1::DTYPE_INT8, 1},
      RuleOp{{UpdateRule::kLion, 1}, &x, f32, &x, &x, &x, nullptr, f32, 1},  // two states
      RuleOp{{UpdateRule::kRmspropCentered, 1}, &x, f32, &x, &x, nullptr, nullptr, f32, 1},
      RuleOp{{UpdateRule::kLion, 1}, &x, v1::DTYPE_FLOAT64, &x, &x, nullptr, nullptr, f32, 1},
      MuonOp{{}, 5},                                              // no rows
      MuonOp{one_by_one, 2},                                      // items of another matrix
      MuonOp{one_by_one, MuonItems(1, 1, 0)},                     // no buffer
      AdafactorOp{one_number, 1},                                 // items of another parameter
      AdafactorOp{one_number, AdafactorItems(one_number.shape)},  // no state
  };
  for (size_t i = 0; i < malformed.size(); ++i) {
    EXPECT_EQ(RunOp(malformed[i]).code(), absl::StatusCode::kInternal) << "operation " << i;
  }
}

TEST_P(DeviceTest, StatusShowsWhatRunsAndCountsWhatIsDone) {
  Log log;
  gate_.Close(device_, StreamId::kUnshard);
  for (int i = 0; i < 3; ++i) device_->Submit(StreamId::kOptimizer, {"update", {}, log.Entry("update")});
  std::vector<StreamStatus> status = device_->Status();
  ASSERT_EQ(status.size(), static_cast<size_t>(kStreamCount));
  EXPECT_EQ(status[2].stream, StreamId::kOptimizer);
  EXPECT_EQ(status[2].submitted, 3u);
  EXPECT_EQ(status[2].done, 0u);
  EXPECT_EQ(status[0].submitted, 1u);
  gate_.Release();
  log.WaitFor(3);
  EXPECT_TRUE(Run({}, StreamId::kOptimizer).ok());
  status = device_->Status();
  EXPECT_EQ(status[2].done, 4u);
  EXPECT_EQ(status[2].current, "");
}

TEST_P(DeviceTest, StatusNamesTheRunningWorkAndItsTime) {
  // Long enough to be seen: many copies of a large range; again where this thread did not run meanwhile.
  const Vec<char> src(8 << 20, world_->memory());
  Vec<char> dst(src, world_->memory());
  Log log;
  bool seen = false;
  uint64_t submitted = 0;
  const absl::Time deadline = absl::Now() + kLimit;
  while (!seen && absl::Now() < deadline) {
    DeviceWork work;
    work.label = "copy a lot";
    for (int i = 0; i < 200; ++i)
      work.ops.emplace_back(CopyOp{src.data(), dst.data(), static_cast<int64_t>(src.size())});
    work.done = log.Entry("copy");
    device_->Submit(StreamId::kOptimizer, std::move(work));
    ++submitted;
    for (StreamStatus status; !seen && status.done < submitted && absl::Now() < deadline;) {
      status = device_->Status()[2];
      seen = status.current == "copy a lot" && status.busy_us > 0;
    }
    log.WaitFor(submitted);
  }
  EXPECT_TRUE(seen);
  const StreamStatus after = device_->Status()[2];
  EXPECT_EQ(after.current, "");
  EXPECT_GT(after.busy_us, 100);
}

TEST_P(DeviceTest, EveryDoneRunsOnceWhenShutdownMeetsQueuedWork) {
  Log log;
  float &a = New(1.0f), &b = New(0.0f);
  gate_.Close(device_, StreamId::kUnshard);
  for (int i = 0; i < 10; ++i) {
    DeviceWork work;
    work.label = "late copy";
    work.ops = {CopyOp{&a, &b, 4}};
    work.done = log.Entry("late copy");
    device_->Submit(static_cast<StreamId>(i % kStreamCount), std::move(work));
  }
  absl::Notification started;
  std::thread shutdown([&] {
    started.Notify();
    device_->Shutdown();
  });
  started.WaitForNotification();
  // Shutdown is on its way when submitted work is no longer run; it cannot be seen from outside while the gate holds
  // the device, so it is given the chance to be first and both outcomes are legal for what the gate let through.
  gate_.Release();
  shutdown.join();
  const std::vector<absl::Status> statuses = log.statuses();
  ASSERT_EQ(statuses.size(), 10u);
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kCancelled) << status;
  }
  const std::vector<StreamStatus> streams = device_->Status();
  for (const StreamStatus& stream : streams) EXPECT_EQ(stream.done, stream.submitted);
}

TEST_P(DeviceTest, ShutdownInterruptsALongWorkBetweenOperations) {
  const Vec<char> src(8 << 20, world_->memory());
  Vec<char> dst(src, world_->memory());
  DeviceWork work;
  work.label = "copy for minutes";
  for (int i = 0; i < 200'000; ++i) {
    work.ops.emplace_back(CopyOp{src.data(), dst.data(), static_cast<int64_t>(src.size())});
  }
  Log log;
  work.done = log.Entry("long");
  device_->Submit(StreamId::kOptimizer, std::move(work));
  const absl::Time deadline = absl::Now() + kLimit;
  while (device_->Status()[2].current.empty() && absl::Now() < deadline) {
  }
  const absl::Time before = absl::Now();
  device_->Shutdown();
  EXPECT_LT(absl::Now() - before, absl::Seconds(20));
  ASSERT_EQ(log.WaitFor(1).size(), 1u);
  EXPECT_EQ(log.statuses()[0].code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(std::string(log.statuses()[0].message()), HasSubstr("copy for minutes"));
}

TEST_P(DeviceTest, WorkOfAJobInAStreamKeepsItsOrder) {
  constexpr int kJobs = 3;
  constexpr int kWorks = 40;
  Log logs[kJobs];
  const Vec<float> from = Floats(1 << 16, 1);
  Vec<float> to = Floats(1 << 16);
  gate_.Close(device_, StreamId::kUnshard);
  std::vector<std::string> want;
  for (int i = 0; i < kWorks; ++i) {
    want.push_back(std::to_string(i));
    for (int job = 0; job < kJobs; ++job) {
      DeviceWork work;
      work.label = "copy";
      work.owner.job = static_cast<uint64_t>(job);
      if (i % 3 == 0) {
        work.ops.emplace_back(CopyOp{from.data(), to.data(), static_cast<int64_t>(from.size() * sizeof(float))});
      }
      work.done = logs[job].Entry(want.back());
      device_->Submit(StreamId::kOptimizer, std::move(work));
    }
  }
  gate_.Release();
  for (Log& log : logs) EXPECT_EQ(log.WaitFor(kWorks), want);
}

TEST_P(DeviceTest, ShutdownEndsTheWorkOfEveryJob) {
  Log log;
  const Vec<float> from = Floats(1 << 20, 1);
  Vec<float> to = Floats(1 << 20);
  for (uint64_t job = 0; job < 5; ++job) {
    for (int i = 0; i < kStreamCount; ++i) {
      DeviceWork work;
      work.label = "copies";
      work.owner.job = job;
      work.ops.assign(200, CopyOp{from.data(), to.data(), static_cast<int64_t>(from.size() * sizeof(float))});
      work.done = log.Entry("copies");
      device_->Submit(static_cast<StreamId>(i), std::move(work));
    }
  }
  device_->Shutdown();
  EXPECT_EQ(log.WaitFor(5 * kStreamCount).size(), size_t{5 * kStreamCount});
  for (const absl::Status& status : log.statuses()) {
    EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kCancelled) << status;
  }
  for (const StreamStatus& stream : device_->Status()) EXPECT_EQ(stream.done, stream.submitted);
}

TEST_P(DeviceTest, WorkSubmittedAfterShutdownIsCancelledOnAnotherThread) {
  device_->Shutdown();
  device_->Shutdown();
  absl::Mutex held;  // what a caller may hold and `done` may want
  absl::Notification done;
  absl::Status result;
  float &a = New(1.0f), &b = New(0.0f);
  {
    absl::MutexLock lock(&held);
    device_->Submit(StreamId::kUnshard, {"too late", {CopyOp{&a, &b, 4}}, [&](absl::Status status) {
                                           absl::MutexLock inner(&held);
                                           result = std::move(status);
                                           done.Notify();
                                         }});
  }
  ASSERT_TRUE(done.WaitForNotificationWithTimeout(kLimit));
  EXPECT_EQ(result.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(b, 0.0f);
  EXPECT_EQ(Run({}).code(), absl::StatusCode::kCancelled);
}

TEST_P(DeviceTest, WorkSubmittedByACancelledDoneIsCancelledToo) {
  Log log;
  gate_.Close(device_, StreamId::kUnshard);
  device_->Submit(StreamId::kOptimizer, {"first", {}, [&](absl::Status) {
                                           device_->Submit(StreamId::kUnshard, {"second", {}, log.Entry("second")});
                                         }});
  std::thread shutdown([&] { device_->Shutdown(); });
  gate_.Release();
  shutdown.join();
  log.WaitFor(1);
}

TEST_P(DeviceTest, DestructionFinishesEveryWork) {
  Log log;
  for (int i = 0; i < 50; ++i) {
    device_->Submit(static_cast<StreamId>(i % kStreamCount), {"work", {}, log.Entry("work")});
  }
  devices_.clear();
  EXPECT_EQ(log.statuses().size(), 50u);
}

TEST_P(DeviceTest, ManyThreadsMaySubmitAtOnce) {
  Log log;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 100; ++i) {
        devices_[static_cast<size_t>(i) % devices_.size()]->Submit(static_cast<StreamId>((t + i) % kStreamCount),
                                                                   {"work", {}, log.Entry("work")});
        device_->Status();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(log.WaitFor(400).size(), 400u);
}

INSTANTIATE_TEST_SUITE_P(All, DeviceTest, ::testing::ValuesIn(DeviceKinds()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace shardd
