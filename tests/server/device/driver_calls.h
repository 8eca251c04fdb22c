#ifndef SHARDD_TESTS_SERVER_DEVICE_DRIVER_CALLS_H_
#define SHARDD_TESTS_SERVER_DEVICE_DRIVER_CALLS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "server/device/device_memory.h"
#include "tests/server/device/device_world.h"

namespace shardd {

// Verbs for tests that call a driver themselves. They want the context of the first GPU to be current.
class DriverCallsTest : public ::testing::Test {
 protected:
  explicit DriverCallsTest(std::unique_ptr<CudaWorld> world) : world_(std::move(world)) {}

  CUstream Stream() {
    CUstream stream = nullptr;
    EXPECT_EQ(driver_->StreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
    streams_.push_back(stream);
    return stream;
  }
  // Of registered memory.
  uint64_t* Word(uint64_t value) {
    auto* const word = static_cast<uint64_t*>(world_->memory()->allocate(8, 8));
    *word = value;
    return word;
  }
  static CUdeviceptr Address(const void* p) { return reinterpret_cast<CUdeviceptr>(p); }
  bool Drains(CUstream stream) {
    const absl::Time deadline = absl::Now() + absl::Seconds(60);
    while (driver_->StreamQuery(stream) == CUDA_ERROR_NOT_READY && absl::Now() < deadline) std::this_thread::yield();
    return driver_->StreamQuery(stream) == CUDA_SUCCESS;
  }
  static uint64_t Load(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
  // Of the first GPU, for MemCreate.
  static CUmemAllocationProp GpuMemory() {
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    return prop;
  }

  const std::unique_ptr<CudaWorld> world_;
  const CudaDriver& driver_ = world_->driver();
  std::vector<CUstream> streams_;
};

// The first GPU's memory: a new slab is zero, and the host reads what it writes, copies and zeroes there.
inline void ExpectHostReadsBackWhatItWrites(DeviceMemory* memory) {
  constexpr int64_t kBytes = (int64_t{3} << 20) + 12345;  // several pieces of staging, the last one short
  EXPECT_EQ(memory->device(), "cuda:0");
  EXPECT_EQ(memory->device_uuid().size(), 16u);
  const std::unique_ptr<DeviceSlab> slab = *memory->MakeSlab("slab", kBytes, {memory});
  EXPECT_GE(slab->size_bytes(), kBytes);
  std::vector<char> bytes(kBytes), read(kBytes, 'x');
  ASSERT_TRUE(memory->Read(read.data(), slab->data(), kBytes).ok());
  EXPECT_TRUE(read == bytes) << "new memory is not zero";
  std::iota(bytes.begin(), bytes.end(), 1);
  ASSERT_TRUE(memory->Write(slab->data() + 1, bytes.data(), kBytes - 1).ok());
  ASSERT_TRUE(memory->Read(read.data(), slab->data() + 1, kBytes - 1).ok());
  EXPECT_TRUE(std::equal(read.begin(), read.end() - 1, bytes.begin()));
  ASSERT_TRUE(memory->Copy({{slab->data() + 1, slab->data() + 101, 50}, {slab->data(), slab->data(), 0}}).ok());
  ASSERT_TRUE(memory->Zero(slab->data() + 1, 25).ok());
  ASSERT_TRUE(memory->Read(read.data(), slab->data() + 1, 200).ok());
  EXPECT_EQ(std::vector<char>(read.begin(), read.begin() + 25), std::vector<char>(25));
  EXPECT_TRUE(std::equal(read.begin() + 25, read.begin() + 100, bytes.begin() + 25));
  EXPECT_TRUE(std::equal(read.begin() + 100, read.begin() + 150, bytes.begin()));
}

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_DEVICE_DRIVER_CALLS_H_
