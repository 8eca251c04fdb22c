// What only the CUDA device promises: credit, loss, errors of the driver, nothing left behind. On the fake driver.

#include "server/device/cuda/cuda_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "tests/server/device/fake_cuda_world.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::Duration kLimit = absl::Seconds(60);

bool Eventually(const std::function<bool()>& condition) {
  const absl::Time end = absl::Now() + kLimit;
  while (!condition() && absl::Now() < end) absl::SleepFor(absl::Milliseconds(1));
  return condition();
}

class CudaDeviceTest : public ::testing::Test {
 protected:
  absl::Status Run(Device& device, std::vector<DeviceOp> ops, StreamId stream = StreamId::kUnshard) {
    absl::Notification notification;
    absl::Status result;
    device.Submit(stream, {"reduce layers.3 step 12", std::move(ops), [&](absl::Status status) {
                             result = std::move(status);
                             notification.Notify();
                           }});
    EXPECT_TRUE(notification.WaitForNotificationWithTimeout(kLimit));
    return result;
  }
  float* Floats(size_t numel, float value = 0) {
    auto* const p = static_cast<float*>(world_.memory()->allocate(numel * sizeof(float), 16));
    std::fill_n(p, numel, value);
    return p;
  }
  fake_cuda::Machine& machine() { return world_.machine(); }

  FakeCudaWorld world_{0, 1};
};

TEST_F(CudaDeviceTest, StreamsHaveThePrioritiesOfWhatWaitsForThem) {
  const auto device = world_.Make();
  EXPECT_THAT(machine().StreamPriorities(), ElementsAre(-5, -4, -3));
  EXPECT_EQ(device->name(), "cuda:0");
  EXPECT_THAT(device->description(), HasSubstr("Fake GPU, 64 GiB"));
}

TEST_F(CudaDeviceTest, KernelsAreLoadedAndRunBeforeTheFirstWork) {
  const auto device = world_.Make();
  EXPECT_EQ(machine().Calls("cuLibraryGetKernel"), 7);
  EXPECT_GE(machine().Calls("cuLaunchKernel"), 7);
  EXPECT_EQ(machine().Calls("cuStreamSynchronize"), 1);
}

TEST_F(CudaDeviceTest, NothingIsLeftOfADeviceEvenAFailedOne) {
  const auto before = machine().live();
  world_.Make().reset();
  EXPECT_TRUE(machine().live() == before);
  for (const char* function :
       {"cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuCtxGetStreamPriorityRange",
        "cuStreamCreateWithPriority", "cuLibraryLoadData", "cuLibraryGetKernel", "cuMemCreate", "cuMemSetAccess",
        "cuMemHostRegister", "cuMemHostGetDevicePointer", "cuLaunchKernel", "cuStreamSynchronize"}) {
    machine().FailCall(function, 1, CUDA_ERROR_INVALID_VALUE);
    const auto device = CudaDevice::Create(world_.driver(), 0, absl::MakeConstSpan(fake_cuda::kFatbinMagic));
    ASSERT_FALSE(device.ok()) << function;
    EXPECT_THAT(std::string(device.status().message()), HasSubstr(function));
    EXPECT_THAT(std::string(device.status().message()), HasSubstr("device=cuda:0"));
    EXPECT_TRUE(machine().live() == before) << function;
  }
}

TEST_F(CudaDeviceTest, WorkOfAnyLengthNeverFillsAStreamsQueue) {
  const auto device = world_.Make({.max_queued_calls = 32});
  float* const chain = Floats(5001);
  chain[0] = 42;
  std::vector<DeviceOp> ops;
  for (int i = 0; i < 5000; ++i) ops.emplace_back(CopyOp{chain + i, chain + i + 1, 4});
  EXPECT_TRUE(Run(*device, std::move(ops)).ok());
  EXPECT_EQ(chain[5000], 42.0f);
  EXPECT_LE(machine().LongestQueue(), 32u);
}

TEST_F(CudaDeviceTest, ManySmallWorksNeverFillTheQueueOfAStream) {
  const auto device = world_.Make({.max_queued_calls = 32});
  float* const x = Floats(2);
  for (int i = 0; i < 500; ++i) device->Submit(StreamId::kOptimizer, {"copy", {CopyOp{x, x + 1, 4}}, nullptr});
  EXPECT_TRUE(Run(*device, {}, StreamId::kOptimizer).ok());
  EXPECT_LE(machine().LongestQueue(), 32u);
  EXPECT_GT(machine().LongestQueue(), 16u) << "credit is there to be used";
}

TEST_F(CudaDeviceTest, NormsOfConsecutiveWorksAddUpWithoutWaits) {
  const auto device = world_.Make();
  float* const x = Floats(1, 3);
  Norm norm(1);
  for (int i = 0; i < 50; ++i) device->Submit(StreamId::kOptimizer, {"norm", {NormOp{x, 1, &norm}}, nullptr});
  EXPECT_TRUE(Run(*device, {}, StreamId::kOptimizer).ok());
  EXPECT_EQ(norm.value(), 150);
}

TEST_F(CudaDeviceTest, NormsOfAnyOrderHaveTheCpuDevicesBits) {
  const auto device = world_.Make();
  CpuWorld cpu;
  const auto cpu_devices = cpu.MakeAll();
  const int64_t numel = (int64_t{1} << 20) + 4097;  // more than a slice, and a part of a block
  float* const x = Floats(static_cast<size_t>(numel));
  for (int64_t i = 0; i < numel; ++i) x[i] = static_cast<float>(i % 1009 - 500) / 77;
  for (const double order : {1.0, 2.0, 3.0, 4.0, double{INFINITY}}) {
    Norm got(order), want(order);
    ASSERT_TRUE(Run(*device, {NormOp{x, numel, &got}, NormOp{x, 100, &got}}).ok());
    ASSERT_TRUE(Run(*cpu_devices.front(), {NormOp{x, numel, &want}, NormOp{x, 100, &want}}).ok());
    EXPECT_EQ(got.value(), want.value()) << order;
  }
}

TEST_F(CudaDeviceTest, MoreSourcesThanAKernelTakesAreRefusedAndCounted) {
  const auto device = world_.Make();
  float* const x = Floats(2, 1);
  const auto reduce = [&](size_t sources) {
    return ReduceOp{std::vector<const void*>(sources, x), v1::DTYPE_FLOAT32, v1::DTYPE_UNSPECIFIED, 1, false, x + 1, 1};
  };
  EXPECT_TRUE(Run(*device, {reduce(128)}).ok());
  EXPECT_EQ(x[1], 128.0f);
  const absl::Status status = Run(*device, {reduce(129)});
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("got 129, want at most 128"));
}

TEST_F(CudaDeviceTest, AFailedCallFailsOnlyItsWorkQuotingTheDriver) {
  const auto device = world_.Make();
  float *const a = Floats(1, 1), *const b = Floats(1), *const c = Floats(1);
  const std::vector<DeviceOp> ops = {CopyOp{a, b, 4}, CopyOp{b, c, 4}};
  machine().FailCall("cuMemcpyAsync", 2, CUDA_ERROR_INVALID_VALUE);
  const absl::Status status = Run(*device, ops);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  for (const char* part : {"reduce layers.3 step 12", "operation 1", "cuMemcpyAsync 4 bytes on unshard",
                           "CUDA_ERROR_INVALID_VALUE: invalid argument", "device=cuda:0"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
  EXPECT_EQ(*b, 1.0f) << "what came before has run when the work is done";
  EXPECT_EQ(*c, 0.0f);
  EXPECT_TRUE(Run(*device, ops).ok()) << "the stream goes on";
  EXPECT_EQ(*c, 1.0f);
  EXPECT_TRUE(device->lost().ok());
}

TEST_F(CudaDeviceTest, WorkWhoseEndCannotBeMarkedFailsWithThatError) {
  const auto device = world_.Make();
  float *const a = Floats(1, 1), *const b = Floats(1);
  machine().FailCall("cuLaunchHostFunc", 1, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(Run(*device, {CopyOp{a, b, 4}}).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(*b, 1.0f) << "it had run when that was said";
  EXPECT_TRUE(Run(*device, {CopyOp{a, b, 4}}).ok());
}

class CudaLossTest : public CudaDeviceTest {
 protected:
  // A cast that does not end before Release, once Hold was called.
  CudaLossTest() {
    machine().AddKernel(cuda::kCastKernel, sizeof(cuda::CastArgs), [this](const fake_cuda::Launch&) {
      if (hold_) released_.WaitForNotificationWithTimeout(kLimit);
      return true;
    });
    device_ = world_.Make({.check_interval = absl::Milliseconds(5)});
  }
  ~CudaLossTest() override { released_.Notify(); }

  void Submit(StreamId stream, std::vector<DeviceOp> ops) {
    ++submitted_;
    device_->Submit(stream, {"work", std::move(ops), [this](absl::Status status) {
                               absl::MutexLock lock(&mutex_);
                               statuses_.push_back(std::move(status));
                             }});
  }
  // All that was submitted is done, with the loss and what the driver said.
  void ExpectAllLost(const char* driver_says) {
    absl::MutexLock lock(&mutex_);
    const auto all = [this] { return statuses_.size() == submitted_; };
    ASSERT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&all), kLimit)) << statuses_.size() << " of " << submitted_;
    for (const absl::Status& status : statuses_) {
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("device cuda:0 is lost"));
      EXPECT_THAT(std::string(status.message()), HasSubstr(driver_says));
    }
    statuses_.clear();
    submitted_ = 0;
    EXPECT_EQ(device_->lost().code(), absl::StatusCode::kDataLoss);
  }

  std::atomic<bool> hold_ = false;
  absl::Notification released_;
  absl::Mutex mutex_;
  std::vector<absl::Status> statuses_;
  size_t submitted_ = 0;
  float* const x_ = Floats(64);
  std::unique_ptr<CudaDevice> device_;
};

TEST_F(CudaLossTest, AGpuThatFallsOffTheBusEndsAllWork) {
  hold_ = true;
  Norm norm(1);
  for (int i = 0; i < kStreamCount; ++i) {
    const auto stream = static_cast<StreamId>(i);
    Submit(stream, {CastOp{x_, v1::DTYPE_FLOAT32, x_ + 1, v1::DTYPE_BFLOAT16, 1}});
    Submit(stream, {NormOp{x_, 1, &norm}, CopyOp{x_, x_ + 1, 4}});
    Submit(stream, {});
  }
  machine().LoseGpu(0, CUDA_ERROR_ECC_UNCORRECTABLE);
  ExpectAllLost("CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error");
  EXPECT_EQ(norm.value(), 0) << "what has not run adds nothing";
  Submit(StreamId::kOptimizer, {CopyOp{x_, x_ + 1, 4}});
  Submit(StreamId::kUnshard, {});
  ExpectAllLost("CUDA_ERROR_ECC_UNCORRECTABLE");
  for (const StreamStatus& stream : device_->Status()) {
    EXPECT_EQ(stream.done, stream.submitted);
    EXPECT_EQ(stream.current, "");
  }
  device_->Shutdown();
  EXPECT_EQ(Run(*device_, {}).code(), absl::StatusCode::kCancelled);
}

TEST_F(CudaLossTest, AnAddressThatTheGpuDoesNotReachLosesIt) {
  float on_the_stack = 1;
  Submit(StreamId::kPostBackward,
         {ReduceOp{{&on_the_stack}, v1::DTYPE_FLOAT32, v1::DTYPE_UNSPECIFIED, 1, false, x_, 1}});
  ExpectAllLost("CUDA_ERROR_ILLEGAL_ADDRESS");
  EXPECT_EQ(x_[0], 0.0f);
}

TEST_F(CudaLossTest, WritingThroughAReadOnlyMappingLosesTheGpu) {
  const CudaSlab slab = *CudaSlab::Create(&world_.driver(), 0, 1, "slab");
  const UniqueFd fd = *slab.ExportFd();
  const CudaSlab view =
      *CudaSlab::Import(&world_.driver(), 0, fd.get(), slab.size_bytes(), CudaSlab::Access::kReadOnly, "view of slab");
  EXPECT_TRUE(Run(*device_, {ZeroOp{slab.data(), slab.size_bytes()}, CopyOp{view.data(), x_, 4}}).ok());
  EXPECT_EQ(Run(*device_, {CopyOp{x_, view.data(), 4}}).code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(device_->lost().ok()) << "the call has seen it";
  Submit(StreamId::kUnshard,
         {ReduceOp{{x_}, v1::DTYPE_FLOAT32, v1::DTYPE_UNSPECIFIED, 1, false, static_cast<float*>(view.data()), 1}});
  ExpectAllLost("CUDA_ERROR_ILLEGAL_ADDRESS");
}

TEST_F(CudaLossTest, ACallThatReportsTheLossEndsAllWork) {
  machine().FailCall("cuLaunchKernel", 1, CUDA_ERROR_ILLEGAL_ADDRESS);
  for (int i = 0; i < kStreamCount; ++i) {
    Submit(static_cast<StreamId>(i), {CastOp{x_, v1::DTYPE_FLOAT32, x_ + 1, v1::DTYPE_BFLOAT16, 1}});
  }
  absl::MutexLock lock(&mutex_);
  const auto all = [this] { return statuses_.size() == submitted_; };
  ASSERT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&all), kLimit));
  EXPECT_EQ(device_->lost().code(), absl::StatusCode::kDataLoss);
}

TEST_F(CudaLossTest, ShutdownOfADeviceThatIsLostMeanwhileEnds) {
  hold_ = true;
  Submit(StreamId::kUnshard, {CastOp{x_, v1::DTYPE_FLOAT32, x_ + 1, v1::DTYPE_BFLOAT16, 1}});
  std::thread shutdown([this] { device_->Shutdown(); });
  machine().LoseGpu(0);
  shutdown.join();
  absl::MutexLock lock(&mutex_);
  ASSERT_EQ(statuses_.size(), 1u);
  EXPECT_FALSE(statuses_[0].ok());
}

TEST_F(CudaDeviceTest, NoCopyOfTheSuiteGoesThroughPageableMemory) {
  const auto device = world_.Make();
  float* const x = Floats(2);
  EXPECT_TRUE(Run(*device, {CopyOp{x, x + 1, 4}}).ok());
  EXPECT_EQ(machine().PageableCopies(), 0);
}

TEST_F(CudaDeviceTest, ShuttingDownAHangingGpuEndsItsWorkAsLost) {
  const auto device = world_.Make({.check_interval = absl::Milliseconds(5), .hang_limit = absl::Milliseconds(50)});
  float* const x = Floats(2);
  machine().HangGpu(0);
  const int64_t ends = machine().Calls("cuLaunchHostFunc");
  absl::Mutex mutex;
  std::vector<absl::Status> statuses;
  for (int i = 0; i < kStreamCount; ++i) {
    device->Submit(static_cast<StreamId>(i), {"copy", {CopyOp{x, x + 1, 4}}, [&](absl::Status status) {
                                                absl::MutexLock lock(&mutex);
                                                statuses.push_back(std::move(status));
                                              }});
  }
  EXPECT_TRUE(Eventually([&] { return machine().Calls("cuLaunchHostFunc") == ends + kStreamCount; }));
  device->Shutdown();
  absl::MutexLock lock(&mutex);
  ASSERT_EQ(statuses.size(), size_t{kStreamCount});
  for (const absl::Status& status : statuses) EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_EQ(device->lost().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(device->lost().message()), HasSubstr("it hangs: work that it had when it was shut down"));
}

TEST(CudaDeviceHangTest, ShutdownLeavesAThreadStuckInTheDriver) {
  FakeCudaWorld world(/*delay_seed=*/0, /*gpus=*/1, /*queue_limit=*/4);  // the call that finds it full blocks
  float* const x = static_cast<float*>(world.memory()->allocate(8, 16));
  std::atomic<int> done = 0;
  {
    const auto device = world.Make({.check_interval = absl::Milliseconds(5), .hang_limit = absl::Milliseconds(50)});
    world.machine().HangGpu(0);
    const int64_t copies = world.machine().Calls("cuMemcpyAsync");
    const std::vector<DeviceOp> ops(10, CopyOp{x, x + 1, 4});
    device->Submit(StreamId::kUnshard, {"copies", ops, [&](absl::Status) { ++done; }});
    // Of the ten, the fifth does not return.
    EXPECT_TRUE(Eventually([&] { return world.machine().Calls("cuMemcpyAsync") == copies + 5; }));
    device->Shutdown();
    EXPECT_EQ(done, 0);
    EXPECT_TRUE(device->lost().ok()) << "nobody knows";
    world.machine().HangGpu(0, false);
  }
  EXPECT_EQ(done, 1) << "the destructor waits for the thread";
}

TEST_F(CudaDeviceTest, GpusAreSelectedByNumber) {
  const auto make = [&](const char* which) {
    return MakeCudaDevices(world_.driver(), *ParseCudaSelection(which), absl::MakeConstSpan(fake_cuda::kFatbinMagic));
  };
  EXPECT_EQ(make("all")->devices.size(), 1u);
  EXPECT_EQ(make("0")->devices.front()->name(), "cuda:0");
  const absl::Status status = make("0,3").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("find GPU 3: the driver shows 1"));
  EXPECT_EQ(MakeCudaDevices(world_.driver(), {true, {}}, {}).status().code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace shardd
