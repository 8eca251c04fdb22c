// Of the fake driver alone: what it refuses where the real one would crash or lose the GPU. What both do:
// driver_conformance_test.cc.

#include <gtest/gtest.h>

#include <thread>

#include "absl/time/clock.h"
#include "tests/server/device/driver_calls.h"
#include "tests/server/device/fake_cuda_world.h"
#include "tests/testing/process.h"

namespace shardd {
namespace {

class FakeCudaTest : public DriverCallsTest {
 protected:
  FakeCudaTest() : DriverCallsTest(std::make_unique<FakeCudaWorld>(/*delay_seed=*/0, /*gpus=*/2)) {
    (void)driver_->DevicePrimaryCtxRetain(&context_, 0);
    (void)driver_->CtxPushCurrent(context_);
  }
  ~FakeCudaTest() override {
    CUcontext popped;
    (void)driver_->CtxPopCurrent(&popped);
  }
  CUcontext context_ = nullptr;
};

TEST_F(FakeCudaTest, WhatTheDriverRefusesIsRefused) {
  uint64_t* const word = Word(0);
  const CUstream stream = Stream();
  uint64_t unregistered = 0;
  EXPECT_EQ(driver_->StreamWriteValue64(stream, Address(word) + 4, 1, 0), CUDA_ERROR_INVALID_VALUE) << "unaligned";
  EXPECT_EQ(driver_->StreamWaitValue64(stream, Address(&unregistered), 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver_->MemsetD8Async(Address(&unregistered), 0, 8, stream), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver_->StreamQuery(reinterpret_cast<CUstream>(8)), CUDA_ERROR_INVALID_HANDLE);
  CUevent event = nullptr;
  ASSERT_EQ(driver_->EventCreate(&event, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
  EXPECT_EQ(driver_->EventDestroy(event), CUDA_SUCCESS);
  EXPECT_EQ(driver_->EventDestroy(event), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(driver_->MemHostRegister(word, 8, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  EXPECT_EQ(driver_->MemHostUnregister(&unregistered), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  const CUmemAllocationProp prop = GpuMemory();
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(driver_->MemCreate(&handle, 1000, &prop, 0), CUDA_ERROR_INVALID_VALUE)
      << "not a multiple of the granularity";
  ASSERT_EQ(driver_->MemCreate(&handle, 2 << 20, &prop, 0), CUDA_SUCCESS);
  CUdeviceptr address = 0;
  ASSERT_EQ(driver_->MemAddressReserve(&address, 2 << 20, 0, 0, 0), CUDA_SUCCESS);
  EXPECT_EQ(driver_->MemMap(address + 4096, 2 << 20, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver_->MemMap(address, 4 << 20, 0, handle, 0), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(driver_->MemMap(address, 2 << 20, 0, handle + 7, 0), CUDA_ERROR_INVALID_VALUE) << "no such handle";
  ASSERT_EQ(driver_->MemMap(address, 2 << 20, 0, handle, 0), CUDA_SUCCESS);
  EXPECT_EQ(driver_->StreamWriteValue64(stream, address, 1, 0), CUDA_ERROR_INVALID_VALUE) << "mapped, without access";
  EXPECT_EQ(driver_->MemAddressFree(address, 2 << 20), CUDA_ERROR_INVALID_VALUE) << "still mapped";
  EXPECT_EQ(driver_->MemUnmap(address, 1 << 20), CUDA_ERROR_INVALID_VALUE) << "half of a mapping";
  EXPECT_EQ(driver_->MemUnmap(address, 2 << 20), CUDA_SUCCESS);
  EXPECT_EQ(driver_->MemAddressFree(address, 2 << 20), CUDA_SUCCESS);
  EXPECT_EQ(driver_->MemRelease(handle), CUDA_SUCCESS);
  EXPECT_EQ(driver_->MemRelease(handle), CUDA_ERROR_INVALID_VALUE);
  CUlibrary library = nullptr;
  const char no_image[] = "no fat binary";
  EXPECT_EQ(driver_->LibraryLoadData(&library, no_image, nullptr, nullptr, 0, nullptr, nullptr, 0),
            CUDA_ERROR_INVALID_IMAGE);
  ASSERT_EQ(driver_->LibraryLoadData(&library, fake_cuda::kFatbinMagic, nullptr, nullptr, 0, nullptr, nullptr, 0),
            CUDA_SUCCESS);
  CUkernel kernel = nullptr;
  EXPECT_EQ(driver_->LibraryGetKernel(&kernel, library, "shardd_no_such"), CUDA_ERROR_NOT_FOUND);
}

TEST_F(FakeCudaTest, MemoryThatTheHostReadsOnlyIsRegisteredAsThat) {
  void* const page = mmap(nullptr, 4096, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EXPECT_EQ(driver_->MemHostRegister(page, 4096, CU_MEMHOSTREGISTER_PORTABLE), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(driver_->MemHostRegister(page, 4096, fake_cuda::kHostRegisterReadOnly), CUDA_SUCCESS);
  const CUstream stream = Stream();
  EXPECT_EQ(driver_->StreamWaitValue64(stream, Address(page), 0, 0), CUDA_SUCCESS);
  EXPECT_TRUE(Drains(stream));
  EXPECT_EQ(driver_->StreamWriteValue64(stream, Address(page), 1, 0), CUDA_SUCCESS) << "the call does not look";
  EXPECT_EQ(driver_->StreamSynchronize(stream), CUDA_ERROR_LAUNCH_FAILED) << "and the GPU is lost";
}

TEST_F(FakeCudaTest, WordsWrittenThroughAReadOnlyMappingLoseTheGpu) {
  const CudaSlab slab = *CudaSlab::Create(&driver_, 0, 1, "slab");
  const UniqueFd fd = *slab.ExportFd();
  const CudaSlab view =
      *CudaSlab::Import(&driver_, 0, fd.get(), slab.size_bytes(), CudaSlab::Access::kReadOnly, "view of slab");
  const CUstream stream = Stream();
  EXPECT_EQ(driver_->StreamWriteValue64(stream, Address(view.data()), 1, 0), CUDA_SUCCESS);
  EXPECT_EQ(driver_->StreamSynchronize(stream), CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_EQ(driver_->StreamQuery(stream), CUDA_ERROR_LAUNCH_FAILED);
}

TEST_F(FakeCudaTest, AThreadNeedsTheContextOfTheStream) {
  uint64_t* const word = Word(0);
  const CUstream stream = Stream();
  CUcontext second = nullptr;
  ASSERT_EQ(driver_->DevicePrimaryCtxRetain(&second, 1), CUDA_SUCCESS);
  std::thread([&] {
    EXPECT_EQ(driver_->StreamWriteValue64(stream, Address(word), 1, 0), CUDA_ERROR_INVALID_CONTEXT) << "none";
    EXPECT_EQ(driver_->CtxSetCurrent(second), CUDA_SUCCESS);
    EXPECT_EQ(driver_->StreamWriteValue64(stream, Address(word), 1, 0), CUDA_ERROR_INVALID_HANDLE) << "another GPU's";
    EXPECT_EQ(driver_->CtxSetCurrent(context_), CUDA_SUCCESS);
    EXPECT_EQ(driver_->StreamWriteValue64(stream, Address(word), 1, 0), CUDA_SUCCESS);
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
  EXPECT_EQ(driver->Init(0), CUDA_ERROR_NO_DEVICE);
  EXPECT_EQ(driver.Check(CUDA_ERROR_NO_DEVICE, "cuInit", "").code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace shardd
