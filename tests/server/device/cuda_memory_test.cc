// Slabs of jobs on a GPU, and what the host writes and reads of them, on the fake driver.

#include <unistd.h>

#include <numeric>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/device/device_memory.h"
#include "tests/server/device/driver_calls.h"
#include "tests/server/device/fake_cuda_world.h"

namespace shardd {
namespace {

TEST(CudaMemory, TheHostReadsWhatItWroteWithoutPageableCopies) {
  FakeCudaWorld world(/*delay_seed=*/3);
  const auto live = world.machine().live();
  {
    const std::unique_ptr<CudaDevice> device = world.Make();
    DeviceMemory* const memory = device->memory();
    ASSERT_NE(memory, nullptr);
    ASSERT_NO_FATAL_FAILURE(ExpectHostReadsBackWhatItWrites(memory));
    EXPECT_EQ(world.machine().PageableCopies(), 0);
  }
  EXPECT_EQ(world.machine().live(), live);
}

TEST(CudaMemory, EveryGpuCopiesRegisteredMemoryAtTheHostsAddresses) {
  FakeCudaWorld world(/*delay_seed=*/0, /*gpus=*/2);
  const std::vector<std::unique_ptr<Device>> devices = world.MakeAll();
  DeviceMemory* const first = devices[0]->memory();
  DeviceMemory* const second = devices[1]->memory();
  const std::unique_ptr<DeviceSlab> slab = *first->MakeSlab("slab", 4096, {first, second});
  std::vector<char> host(10000, 'a');
  {
    const auto registered = first->RegisterHost("slab \"shards\"", host.data(), 10000, {first, second});
    ASSERT_TRUE(registered.ok()) << registered.status();
    const auto again = second->RegisterHost("slab \"shards\"", host.data() + 5000, 100, {first, second});
    EXPECT_FALSE(again.ok());
    EXPECT_THAT(std::string(again.status().message()),
                ::testing::HasSubstr("cuMemHostRegister slab \"shards\", 100 bytes: CUDA_ERROR_HOST_MEMORY_ALREADY"));
    for (DeviceMemory* memory : {first, second}) {
      ASSERT_TRUE(memory->Zero(slab->data(), 4096).ok());
      ASSERT_TRUE(memory->Copy({{host.data() + 7, slab->data(), 4096}}).ok());
      ASSERT_TRUE(memory->Zero(host.data() + 8000, 50).ok());
      ASSERT_TRUE(memory->Copy({{slab->data(), host.data() + 8010, 10}}).ok());
    }
    EXPECT_EQ(world.machine().PageableCopies(), 0);
  }
  EXPECT_EQ(std::string(host.data() + 8000, 51),
            std::string(10, '\0') + std::string(10, 'a') + std::string(30, '\0') + "a");
  ASSERT_TRUE(first->Copy({{host.data(), slab->data(), 1}}).ok());
  EXPECT_EQ(world.machine().PageableCopies(), 1) << "it is still registered";
}

TEST(CudaMemory, WhatCannotBePinnedSaysWhatToRaise) {
  FakeCudaWorld world;
  const std::unique_ptr<CudaDevice> device = world.Make();
  std::vector<char> host(10000);
  world.machine().FailCall("cuMemHostRegister", 1, CUDA_ERROR_OUT_OF_MEMORY);
  const auto refused = device->memory()->RegisterHost("slab \"optimizer\"", host.data(), 10000, {device->memory()});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  for (const char* text : {"slab \"optimizer\", 10000 bytes", "RLIMIT_MEMLOCK", "OFFLOAD_NONE"}) {
    EXPECT_THAT(std::string(refused.status().message()), ::testing::HasSubstr(text));
  }
  EXPECT_TRUE(device->memory()->RegisterHost("slab \"optimizer\"", host.data(), 10000, {device->memory()}).ok());
}

TEST(CudaMemory, AllAndOnlyTheJobsDevicesReachASlab) {
  FakeCudaWorld world(/*delay_seed=*/0, /*gpus=*/2);
  const std::vector<std::unique_ptr<Device>> devices = world.MakeAll();
  DeviceMemory* const first = devices[0]->memory();
  DeviceMemory* const second = devices[1]->memory();
  const std::unique_ptr<DeviceSlab> shared = *first->MakeSlab("shared", 4096, {first, second, second});
  const std::unique_ptr<DeviceSlab> own = *first->MakeSlab("own", 4096, {first});
  char byte = 7;
  EXPECT_TRUE(second->Write(shared->data(), &byte, 1).ok());
  EXPECT_EQ(second->Write(own->data(), &byte, 1).code(), absl::StatusCode::kDataLoss);
}

TEST(CudaMemory, AGpuThatCannotReachMemoryIsNamedLeavingNothing) {
  FakeCudaWorld world(/*delay_seed=*/0, /*gpus=*/2);
  const std::vector<std::unique_ptr<Device>> devices = world.MakeAll();
  DeviceMemory* const first = devices[0]->memory();
  ASSERT_TRUE(first->MakeSlab("warm", 4096, {first}).ok());  // stream and staging
  const auto live = world.machine().live();
  world.machine().FailCall("cuMemSetAccess", 2, CUDA_ERROR_INVALID_DEVICE);
  const auto slab = first->MakeSlab("slab \"shards\"", 4096, {first, devices[1]->memory()});
  EXPECT_EQ(slab.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(slab.status().message()),
              ::testing::HasSubstr("map slab \"shards\": cuda:1 does not reach the memory of cuda:0"));
  world.machine().FailCall("cuMemCreate", 1, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(first->MakeSlab("slab", 4096, {first}).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(world.machine().live(), live);
}

TEST(CudaMemory, ASlabOverTwoGpusIsOneContiguousRange) {
  FakeCudaWorld world(/*delay_seed=*/5, /*gpus=*/2);
  const std::vector<std::unique_ptr<Device>> devices = world.MakeAll();
  DeviceMemory* const first = devices[0]->memory();
  DeviceMemory* const second = devices[1]->memory();
  const int64_t page = *first->PageBytes();
  const std::unique_ptr<DeviceSlab> slab =
      *first->MakeSpreadSlab("slab", {{second, page}, {first, page}}, {first, second});
  ASSERT_EQ(slab->pieces().size(), 2u);
  EXPECT_EQ(slab->pieces()[0].on, second);
  EXPECT_EQ(slab->pieces()[1].size_bytes, page);
  EXPECT_NE(slab->pieces()[0].fd, slab->pieces()[1].fd);
  std::vector<char> bytes(static_cast<size_t>(2 * page)), read(bytes.size(), 'x');
  ASSERT_TRUE(first->Read(read.data(), slab->data(), 2 * page).ok());
  EXPECT_EQ(read, bytes) << "new memory is not zero";
  std::iota(bytes.begin(), bytes.end(), 1);
  ASSERT_TRUE(first->Write(slab->data(), bytes.data(), 2 * page).ok());
  ASSERT_TRUE(second->Copy({{slab->data() + page - 50, slab->data() + 1, 100}}).ok());
  ASSERT_TRUE(second->Read(read.data(), slab->data(), 2 * page).ok());
  std::copy_n(bytes.begin() + page - 50, 100, bytes.begin() + 1);
  EXPECT_EQ(read, bytes);
}

TEST(CudaMemory, HolesOfASlabTakeNoMemoryButAddresses) {
  FakeCudaWorld world(/*delay_seed=*/5, /*gpus=*/2);
  const auto live = world.machine().live();
  {
    const std::vector<std::unique_ptr<Device>> devices = world.MakeAll();
    DeviceMemory* const first = devices[0]->memory();
    DeviceMemory* const second = devices[1]->memory();
    const int64_t page = *first->PageBytes();
    const std::vector<DeviceMemory::Part> parts = {
        {first, page}, {nullptr, 5 * page}, {second, page}, {first, page}, {nullptr, page}};
    const int64_t free_bytes = first->GetRoom()->free_bytes;
    const std::unique_ptr<DeviceSlab> slab = *first->MakeSpreadSlab("slab", parts, {first, second});
    EXPECT_EQ(first->GetRoom()->free_bytes, free_bytes - 2 * page);
    EXPECT_EQ(first->GetRoom()->slab_bytes, 2 * page);
    EXPECT_EQ(slab->size_bytes(), 9 * page);
    EXPECT_EQ(slab->allocated_bytes(), 3 * page);
    std::vector<char> bytes(static_cast<size_t>(2 * page)), read(bytes.size(), 'x');
    std::iota(bytes.begin(), bytes.end(), 1);
    char* const behind = slab->data() + 6 * page;
    ASSERT_TRUE(second->Read(read.data(), behind, 2 * page).ok());
    EXPECT_EQ(read, std::vector<char>(read.size())) << "new memory is not zero";
    ASSERT_TRUE(first->Write(behind, bytes.data(), 2 * page).ok());
    std::vector<UniqueFd> fds;
    for (const DeviceSlab::Piece& piece : slab->pieces()) {
      if (piece.on != nullptr) fds.emplace_back(dup(piece.fd));
    }
    const auto again = first->TakeUpSlab("slab of before", parts, std::move(fds), {first, second});
    ASSERT_TRUE(again.ok()) << again.status();
    ASSERT_TRUE(second->Read(read.data(), (*again)->data() + 6 * page, 2 * page).ok());
    EXPECT_EQ(read, bytes);
    EXPECT_EQ((*again)->pieces()[1].fd, -1);
    const absl::Status refused = first->MakeSpreadSlab("slab", {{nullptr, page}, {first, page}}, {first}).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  }
  EXPECT_EQ(world.machine().live(), live);
}

TEST(CudaMemory, StagingWithoutADriversAddressIsAskedForAgain) {
  FakeCudaWorld world;
  const std::unique_ptr<CudaDevice> device = world.Make();
  DeviceMemory* const memory = device->memory();
  world.machine().FailCall("cuMemHostGetDevicePointer", 1, CUDA_ERROR_INVALID_VALUE);
  const absl::Status status = memory->MakeSlab("slab", 4096, {memory}).status();
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("cuMemHostGetDevicePointer"));
  const std::unique_ptr<DeviceSlab> slab = *memory->MakeSlab("slab", 4096, {memory});
  char byte = 7, read = 0;
  ASSERT_TRUE(memory->Write(slab->data(), &byte, 1).ok());
  ASSERT_TRUE(memory->Read(&read, slab->data(), 1).ok());
  EXPECT_EQ(read, 7);
}

TEST(CudaMemory, AHangingCopyIsGivenUpWithItsMemory) {
  FakeCudaWorld world;
  const std::unique_ptr<CudaDevice> device = world.Make({.hang_limit = absl::Milliseconds(50)});
  DeviceMemory* const memory = device->memory();
  std::unique_ptr<DeviceSlab> slab = *memory->MakeSlab("slab", 4096, {memory});
  char byte = 7;
  world.machine().HangNextHostCopy(0);
  const absl::Status status = memory->Write(slab->data(), &byte, 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()),
              ::testing::HasSubstr("copy between host and cuda:0: the GPU hangs (not done after 50ms)"));
  const int64_t copies = world.machine().Calls("cuMemcpyAsync");
  EXPECT_EQ(memory->Read(&byte, slab->data(), 1), status);
  EXPECT_EQ(memory->MakeSlab("another", 4096, {memory}).status(), status);
  EXPECT_EQ(world.machine().Calls("cuMemcpyAsync"), copies) << "a GPU that hangs is asked for nothing more";
  const int64_t created = world.machine().Calls("cuMemCreate"), unmapped = world.machine().Calls("cuMemUnmap");
  EXPECT_EQ(memory->MakeSlab("a third", 4096, {memory}).status(), status);
  EXPECT_EQ(world.machine().Calls("cuMemCreate"), created);
  slab.reset();
  EXPECT_EQ(world.machine().Calls("cuMemUnmap"), unmapped) << "unmapping may wait for the GPU";
}

}  // namespace
}  // namespace shardd
