// Of the fake driver alone: what it refuses where the real one would crash or lose the GPU. What both do:
// driver_conformance_test.cc.

#include <gtest/gtest.h>

#include <thread>

#include "absl/time/clock.h"
#include "tests/server/device/fake_cuda_world.h"
#include "tests/testing/process.h"

namespace shardd {
namespace {

constexpr absl::Duration kLimit = absl::Seconds(60);

class FakeCudaTest : public ::testing::Test {
 protected:
  FakeCudaTest() {
    (void)driver_->DevicePrimaryCtxRetain(&context_, 0);
    (void)driver_->CtxPushCurrent(context_);
  }
  ~FakeCudaTest() override {
    cu::Context popped;
    (void)driver_->CtxPopCurrent(&popped);
  }
  cu::Stream Stream() {
    cu::Stream stream = nullptr;
    EXPECT_EQ(driver_->StreamCreateWithPriority(&stream, cu::kStreamNonBlocking, 0), cu::kSuccess);
    return stream;
  }
  // Of registered memory.
  uint64_t* Word(uint64_t value) {
    auto* const word = static_cast<uint64_t*>(world_.memory()->allocate(8, 8));
    *word = value;
    return word;
  }
  static cu::DevicePtr Address(const void* p) { return reinterpret_cast<cu::DevicePtr>(p); }
  bool Drains(cu::Stream stream) {
    const absl::Time deadline = absl::Now() + kLimit;
    while (driver_->StreamQuery(stream) == cu::kNotReady && absl::Now() < deadline) std::this_thread::yield();
    return driver_->StreamQuery(stream) == cu::kSuccess;
  }
  static uint64_t Load(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

  FakeCudaWorld world_{0, 2};
  const CudaDriver& driver_ = world_.driver();
  cu::Context context_ = nullptr;
};

TEST_F(FakeCudaTest, WhatTheDriverRefusesIsRefused) {
  uint64_t* const word = Word(0);
  const cu::Stream stream = Stream();
  uint64_t unregistered = 0;
  EXPECT_EQ(driver_->StreamWriteValue64(stream, Address(word) + 4, 1, 0), cu::kInvalidValue) << "unaligned";
  EXPECT_EQ(driver_->StreamWaitValue64(stream, Address(&unregistered), 0, 0), cu::kInvalidValue);
  EXPECT_EQ(driver_->MemsetD8Async(Address(&unregistered), 0, 8, stream), cu::kInvalidValue);
  EXPECT_EQ(driver_->StreamQuery(reinterpret_cast<cu::Stream>(8)), cu::kInvalidHandle);
  cu::Event event = nullptr;
  ASSERT_EQ(driver_->EventCreate(&event, cu::kEventDisableTiming), cu::kSuccess);
  EXPECT_EQ(driver_->EventDestroy(event), cu::kSuccess);
  EXPECT_EQ(driver_->EventDestroy(event), cu::kInvalidHandle);
  EXPECT_EQ(driver_->MemHostRegister(word, 8, 0), cu::kHostMemoryAlreadyRegistered);
  EXPECT_EQ(driver_->MemHostUnregister(&unregistered), cu::kHostMemoryNotRegistered);
  cu::MemAllocationProp prop = {};
  prop.type = cu::kAllocationPinned;
  prop.location = {cu::kLocationDevice, 0};
  cu::MemHandle handle = 0;
  EXPECT_EQ(driver_->MemCreate(&handle, 1000, &prop, 0), cu::kInvalidValue) << "not a multiple of the granularity";
  ASSERT_EQ(driver_->MemCreate(&handle, 2 << 20, &prop, 0), cu::kSuccess);
  cu::DevicePtr address = 0;
  ASSERT_EQ(driver_->MemAddressReserve(&address, 2 << 20, 0, 0, 0), cu::kSuccess);
  EXPECT_EQ(driver_->MemMap(address + 4096, 2 << 20, 0, handle, 0), cu::kInvalidValue);
  EXPECT_EQ(driver_->MemMap(address, 4 << 20, 0, handle, 0), cu::kNotSupported);
  EXPECT_EQ(driver_->MemMap(address, 2 << 20, 0, handle + 7, 0), cu::kInvalidValue) << "no such handle";
  ASSERT_EQ(driver_->MemMap(address, 2 << 20, 0, handle, 0), cu::kSuccess);
  EXPECT_EQ(driver_->StreamWriteValue64(stream, address, 1, 0), cu::kInvalidValue) << "mapped, without access";
  EXPECT_EQ(driver_->MemAddressFree(address, 2 << 20), cu::kInvalidValue) << "still mapped";
  EXPECT_EQ(driver_->MemUnmap(address, 1 << 20), cu::kInvalidValue) << "half of a mapping";
  EXPECT_EQ(driver_->MemUnmap(address, 2 << 20), cu::kSuccess);
  EXPECT_EQ(driver_->MemAddressFree(address, 2 << 20), cu::kSuccess);
  EXPECT_EQ(driver_->MemRelease(handle), cu::kSuccess);
  EXPECT_EQ(driver_->MemRelease(handle), cu::kInvalidValue);
  cu::Library library = nullptr;
  const char no_image[] = "no fat binary";
  EXPECT_EQ(driver_->LibraryLoadData(&library, no_image, nullptr, nullptr, 0, nullptr, nullptr, 0), cu::kInvalidImage);
  ASSERT_EQ(driver_->LibraryLoadData(&library, fake_cuda::kFatbinMagic, nullptr, nullptr, 0, nullptr, nullptr, 0),
            cu::kSuccess);
  cu::Kernel kernel = nullptr;
  EXPECT_EQ(driver_->LibraryGetKernel(&kernel, library, "shardd_no_such"), cu::kNotFound);
}

TEST_F(FakeCudaTest, MemoryThatTheHostReadsOnlyIsRegisteredAsThat) {
  void* const page = mmap(nullptr, 4096, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EXPECT_EQ(driver_->MemHostRegister(page, 4096, cu::kHostRegisterPortable), cu::kInvalidValue);
  ASSERT_EQ(driver_->MemHostRegister(page, 4096, fake_cuda::kHostRegisterReadOnly), cu::kSuccess);
  const cu::Stream stream = Stream();
  EXPECT_EQ(driver_->StreamWaitValue64(stream, Address(page), 0, 0), cu::kSuccess);
  EXPECT_TRUE(Drains(stream));
  EXPECT_EQ(driver_->StreamWriteValue64(stream, Address(page), 1, 0), cu::kSuccess) << "the call does not look";
  EXPECT_EQ(driver_->StreamSynchronize(stream), cu::kLaunchFailed) << "and the GPU is lost";
}

TEST_F(FakeCudaTest, WordsWrittenThroughAReadOnlyMappingLoseTheGpu) {
  const CudaSlab slab = *CudaSlab::Create(&driver_, 0, 1, "slab");
  const UniqueFd fd = *slab.ExportFd();
  const CudaSlab view =
      *CudaSlab::Import(&driver_, 0, fd.get(), slab.size_bytes(), CudaSlab::Access::kReadOnly, "view of slab");
  const cu::Stream stream = Stream();
  EXPECT_EQ(driver_->StreamWriteValue64(stream, Address(view.data()), 1, 0), cu::kSuccess);
  EXPECT_EQ(driver_->StreamSynchronize(stream), cu::kLaunchFailed);
  EXPECT_EQ(driver_->StreamQuery(stream), cu::kLaunchFailed);
}

TEST_F(FakeCudaTest, AThreadNeedsTheContextOfTheStream) {
  uint64_t* const word = Word(0);
  const cu::Stream stream = Stream();
  cu::Context second = nullptr;
  ASSERT_EQ(driver_->DevicePrimaryCtxRetain(&second, 1), cu::kSuccess);
  std::thread([&] {
    EXPECT_EQ(driver_->StreamWriteValue64(stream, Address(word), 1, 0), cu::kInvalidContext) << "none";
    EXPECT_EQ(driver_->CtxSetCurrent(second), cu::kSuccess);
    EXPECT_EQ(driver_->StreamWriteValue64(stream, Address(word), 1, 0), cu::kInvalidHandle) << "another GPU's";
    EXPECT_EQ(driver_->CtxSetCurrent(context_), cu::kSuccess);
    EXPECT_EQ(driver_->StreamWriteValue64(stream, Address(word), 1, 0), cu::kSuccess);
  }).join();
  EXPECT_TRUE(Drains(stream));
}

TEST(CudaDriverTest, ALibraryThatIsNotThereIsNamed) {
  const absl::Status status = CudaDriver::Load("libshardd-no-such-driver.so.1").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("libshardd-no-such-driver.so.1"), absl::string_view::npos);
}

TEST(CudaDriverTest, ALibraryThatIsNoDriverIsNamed) {
  const absl::Status status = CudaDriver::Load("libm.so.6").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("cuGetProcAddress_v2"), absl::string_view::npos) << status;
}

TEST(CudaDriverTest, AMachineWithoutGpusIsNoReasonToCrash) {
  fake_cuda::MachineOptions none;
  none.gpus = 0;
  const fake_cuda::Machine machine(none);
  const CudaDriver driver(fake_cuda::Table());
  EXPECT_EQ(driver->Init(0), cu::kNoDevice);
  EXPECT_EQ(driver.Check(cu::kNoDevice, "cuInit", "").code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace shardd
