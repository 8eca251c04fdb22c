// What shardd asks of a driver, of NVIDIA's and of the fake alike: a fake that does otherwise would lie in every other
// test.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <numeric>
#include <vector>

#include "absl/time/clock.h"
#include "common/cuda/slab.h"
#include "server/device/device_memory.h"
#include "server/job/wait.h"
#include "tests/server/device/device_world.h"
#include "tests/server/device/driver_calls.h"
#include "tests/testing/process.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

class DriverTest : public DriverCallsTest, public ::testing::WithParamInterface<CudaKind> {
 protected:
  DriverTest() : DriverCallsTest(GetParam().make()) {}
  void SetUp() override {
    if (const std::string why_not = world_->why_not(); !why_not.empty()) GTEST_SKIP() << why_not;
    ASSERT_EQ(driver_->DevicePrimaryCtxRetain(&context_, 0), CUDA_SUCCESS);
    ASSERT_EQ(driver_->CtxPushCurrent(context_), CUDA_SUCCESS);
  }
  void TearDown() override {
    for (CUstream stream : streams_) EXPECT_EQ(driver_->StreamDestroy(stream), CUDA_SUCCESS);
    CUcontext popped;
    if (context_ == nullptr) return;
    (void)driver_->CtxPopCurrent(&popped);
    (void)driver_->DevicePrimaryCtxRelease(0);
  }
  absl::StatusOr<CudaSlab> Create(int64_t size_bytes) {
    return CudaSlab::Create(&driver_, 0, size_bytes, "slab shards of job a");
  }

  CUcontext context_ = nullptr;
};

TEST_P(DriverTest, AWaitHoldsOnlyItsStreamUntilTheHostWrites) {
  uint64_t *const word = Word(4), *const behind = Word(0), *const beside = Word(0);
  const CUstream waiting = Stream(), other = Stream();
  ASSERT_EQ(driver_->StreamWaitValue64(waiting, Address(word), 5, CU_STREAM_WAIT_VALUE_GEQ), CUDA_SUCCESS);
  ASSERT_EQ(driver_->StreamWriteValue64(waiting, Address(behind), 1, CU_STREAM_WRITE_VALUE_DEFAULT), CUDA_SUCCESS);
  ASSERT_EQ(driver_->StreamWriteValue64(other, Address(beside), 1, CU_STREAM_WRITE_VALUE_DEFAULT), CUDA_SUCCESS);
  ASSERT_TRUE(Drains(other));
  EXPECT_EQ(Load(beside), 1u);
  EXPECT_EQ(driver_->StreamQuery(waiting), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(Load(behind), 0u);
  __atomic_store_n(word, 5, __ATOMIC_RELEASE);
  ASSERT_TRUE(Drains(waiting));
  EXPECT_EQ(Load(behind), 1u);
}

TEST_P(DriverTest, AStreamReleasesAnotherThoughTheWaitCameFirst) {
  uint64_t* const word = Word(0);
  const CUstream waiting = Stream(), signalling = Stream();
  ASSERT_EQ(driver_->StreamWaitValue64(waiting, Address(word), uint64_t{1} << 40, CU_STREAM_WAIT_VALUE_GEQ),
            CUDA_SUCCESS);
  ASSERT_EQ(driver_->StreamWriteValue64(signalling, Address(word), uint64_t{2} << 40, 0), CUDA_SUCCESS);
  EXPECT_TRUE(Drains(waiting)) << "a new epoch satisfies every older wait";
}

// The difference is signed: half of all values are behind any other.
TEST_P(DriverTest, TheComparisonOfAWaitIsCyclic) {
  const CUstream stream = Stream();
  const uint64_t half = uint64_t{1} << 63;
  for (const auto& [word, value] :
       std::vector<std::pair<uint64_t, uint64_t>>{{5, 5}, {6, 5}, {0, ~uint64_t{0}}, {half - 1, 0}, {3, half + 4}}) {
    ASSERT_EQ(driver_->StreamWaitValue64(stream, Address(Word(word)), value, CU_STREAM_WAIT_VALUE_GEQ), CUDA_SUCCESS);
    EXPECT_TRUE(Drains(stream)) << word << " is not behind " << value;
  }
  uint64_t* const behind = Word(half);  // 2^63 ahead of 0 counts as behind it
  ASSERT_EQ(driver_->StreamWaitValue64(stream, Address(behind), 0, CU_STREAM_WAIT_VALUE_GEQ), CUDA_SUCCESS);
  uint64_t* const reached = Word(0);
  ASSERT_EQ(driver_->StreamWriteValue64(stream, Address(reached), 1, 0), CUDA_SUCCESS);
  const CUstream other = Stream();
  ASSERT_EQ(driver_->StreamWriteValue64(other, Address(Word(0)), 1, 0), CUDA_SUCCESS);
  ASSERT_TRUE(Drains(other));
  EXPECT_EQ(Load(reached), 0u);
  __atomic_store_n(behind, half - 1, __ATOMIC_RELEASE);
  EXPECT_TRUE(Drains(stream));
}

TEST_P(DriverTest, AnotherProcessReleasesAWait) {
  // A page that both have, as a session's is: shared, and registered here.
  auto* const word =
      static_cast<uint64_t*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_EQ(driver_->MemHostRegister(word, 4096, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
            CUDA_SUCCESS);
  // Forked before this process has threads; it writes when the parent waits.
  ::shardd::testing::Child child([&] {
    while (__atomic_load_n(word + 8, __ATOMIC_ACQUIRE) == 0) usleep(100);
    __atomic_store_n(word, 9, __ATOMIC_RELEASE);
    return 0;
  });
  const CUstream stream = Stream();
  ASSERT_EQ(driver_->StreamWaitValue64(stream, Address(word), 9, CU_STREAM_WAIT_VALUE_GEQ), CUDA_SUCCESS);
  EXPECT_EQ(driver_->StreamQuery(stream), CUDA_ERROR_NOT_READY);
  __atomic_store_n(word + 8, 1, __ATOMIC_RELEASE);
  EXPECT_TRUE(Drains(stream));
  EXPECT_EQ(child.Wait(), 0);
}

TEST_P(DriverTest, EventsOrderStreams) {
  uint64_t *const gate = Word(0), *const word = Word(0);
  const CUstream first = Stream(), second = Stream();
  CUevent event = nullptr;
  ASSERT_EQ(driver_->EventCreate(&event, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
  EXPECT_EQ(driver_->EventQuery(event), CUDA_SUCCESS) << "nothing was recorded";
  ASSERT_EQ(driver_->StreamWaitValue64(first, Address(gate), 1, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver_->EventRecord(event, first), CUDA_SUCCESS);
  ASSERT_EQ(driver_->StreamWaitEvent(second, event, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver_->StreamWriteValue64(second, Address(word), 1, 0), CUDA_SUCCESS);
  EXPECT_EQ(driver_->EventQuery(event), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(Load(word), 0u);
  __atomic_store_n(gate, 1, __ATOMIC_RELEASE);
  EXPECT_EQ(driver_->EventSynchronize(event), CUDA_SUCCESS);
  EXPECT_TRUE(Drains(second));
  EXPECT_EQ(Load(word), 1u);
  EXPECT_EQ(driver_->EventDestroy(event), CUDA_SUCCESS);
}

TEST_P(DriverTest, AHostFunctionMayNotCallTheDriver) {
  struct Call {
    const CudaDriver& driver;
    std::atomic<CUresult> result{CUDA_ERROR_UNKNOWN};
  } call{driver_};
  const CUstream stream = Stream();
  ASSERT_EQ(driver_->LaunchHostFunc(
                stream,
                [](void* argument) {
                  int count = 0;
                  auto* const c = static_cast<Call*>(argument);
                  c->result = c->driver->DeviceGetCount(&count);
                },
                &call),
            CUDA_SUCCESS);
  ASSERT_TRUE(Drains(stream));
  EXPECT_EQ(call.result, CUDA_ERROR_NOT_PERMITTED);
}

TEST_P(DriverTest, WhatIsRefused) {
  uint64_t* const word = Word(0);
  const CUstream stream = Stream();
  uint64_t unregistered = 0;
  EXPECT_EQ(driver_->StreamWriteValue64(stream, Address(word) + 4, 1, 0), CUDA_ERROR_INVALID_VALUE) << "unaligned";
  EXPECT_EQ(driver_->StreamWaitValue64(stream, Address(word) + 4, 0, 0), CUDA_ERROR_INVALID_VALUE) << "unaligned";
  EXPECT_EQ(driver_->StreamWaitValue64(stream, Address(&unregistered), 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver_->MemHostRegister(word, 8, CU_MEMHOSTREGISTER_PORTABLE), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  EXPECT_EQ(driver_->MemHostUnregister(&unregistered), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  const CUmemAllocationProp prop = GpuMemory();
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(driver_->MemCreate(&handle, 1000, &prop, 0), CUDA_ERROR_INVALID_VALUE)
      << "not a multiple of the granularity";
  ASSERT_EQ(driver_->MemCreate(&handle, 2 << 20, &prop, 0), CUDA_SUCCESS);
  CUdeviceptr address = 0;
  ASSERT_EQ(driver_->MemAddressReserve(&address, 4 << 20, 0, 0, 0), CUDA_SUCCESS);
  EXPECT_EQ(driver_->MemMap(address + 4096, 2 << 20, 0, handle, 0), CUDA_ERROR_INVALID_VALUE) << "unaligned";
  EXPECT_EQ(driver_->MemMap(address, 4 << 20, 0, handle, 0), CUDA_ERROR_NOT_SUPPORTED) << "more than it is";
  ASSERT_EQ(driver_->MemMap(address, 2 << 20, 0, handle, 0), CUDA_SUCCESS);
  EXPECT_EQ(driver_->MemMap(address, 2 << 20, 0, handle, 0), CUDA_ERROR_INVALID_VALUE) << "there is something already";
  EXPECT_EQ(driver_->StreamWriteValue64(stream, address, 1, 0), CUDA_ERROR_INVALID_VALUE) << "mapped, without access";
  EXPECT_EQ(driver_->MemAddressFree(address, 4 << 20), CUDA_ERROR_INVALID_VALUE) << "still mapped";
  EXPECT_EQ(driver_->MemUnmap(address, 1 << 20), CUDA_ERROR_INVALID_VALUE) << "half of a mapping";
  EXPECT_EQ(driver_->MemUnmap(address, 2 << 20), CUDA_SUCCESS);
  EXPECT_EQ(driver_->MemAddressFree(address, 4 << 20), CUDA_SUCCESS);
  EXPECT_EQ(driver_->MemRelease(handle), CUDA_SUCCESS);
}

TEST_P(DriverTest, ASlabsSizeIsRoundedUpToTheRecommendedGranularity) {
  for (const auto& [asked, got] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 2 << 20}, {2 << 20, 2 << 20}, {(2 << 20) + 1, 4 << 20}, {5 << 20, 6 << 20}}) {
    const auto slab = Create(asked);
    ASSERT_TRUE(slab.ok()) << slab.status();
    EXPECT_EQ(slab->size_bytes(), got);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(slab->data()) % (2 << 20), 0u);
  }
  EXPECT_EQ(Create(0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(DriverTest, RefusingATooLargeSlabLeavesTheGpuUsable) {
  const int64_t size_bytes = int64_t{1} << 46;
  const absl::Status status = Create(size_bytes).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("of ", size_bytes, " bytes")));
  EXPECT_TRUE(Create(1).ok());
}

TEST_P(DriverTest, MemoryOutlivesItsSlabInADescriptor) {
  const std::unique_ptr<CudaDevice> device = world_->Make();
  std::string read(10, ' ');
  UniqueFd fd;
  int64_t size_bytes = 0;
  {
    CudaSlab slab = *Create(1);
    ASSERT_TRUE(device->memory()->Write(static_cast<char*>(slab.data()), "version 7", 10).ok());
    fd = *slab.ExportFd();
    size_bytes = slab.size_bytes();
  }
  const auto again = CudaSlab::Import(&driver_, 0, fd.get(), size_bytes, CudaSlab::Access::kReadOnly, "slab");
  ASSERT_TRUE(again.ok()) << again.status();
  ASSERT_TRUE(device->memory()->Read(read.data(), static_cast<const char*>(again->data()), 10).ok());
  EXPECT_STREQ(read.c_str(), "version 7");
}

TEST_P(DriverTest, OnlyGpuMemoryOfTheSaidSizeIsImported) {
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  const UniqueFd read_end(pipe_fds[0]), write_end(pipe_fds[1]);
  const absl::Status status =
      CudaSlab::Import(&driver_, 0, read_end.get(), 2 << 20, CudaSlab::Access::kReadWrite, "slab").status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("cuMemImportFromShareableHandle"));
  CudaSlab slab = *Create(1);
  const UniqueFd fd = *slab.ExportFd();
  EXPECT_FALSE(CudaSlab::Import(&driver_, 0, fd.get(), 4 << 20, CudaSlab::Access::kReadWrite, "slab").ok());
  EXPECT_TRUE(CudaSlab::Import(&driver_, 0, fd.get(), 2 << 20, CudaSlab::Access::kReadWrite, "slab").ok());
}

// These calls look; the writes of kernels and words are what loses the GPU (tests/gpu/loss_test.cc).
TEST_P(DriverTest, CopiesAndZerosIntoReadOnlyMappingsAreHarmlesslyRefused) {
  const CudaSlab slab = *Create(1);
  const UniqueFd fd = *slab.ExportFd();
  const CudaSlab view =
      *CudaSlab::Import(&driver_, 0, fd.get(), slab.size_bytes(), CudaSlab::Access::kReadOnly, "view of slab");
  const CUstream stream = Stream();
  uint64_t* const word = Word(7);
  ASSERT_EQ(driver_->MemsetD8Async(Address(slab.data()), 1, 8, stream), CUDA_SUCCESS);
  EXPECT_EQ(driver_->MemcpyAsync(Address(view.data()), Address(word), 8, stream), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver_->MemsetD8Async(Address(view.data()), 0, 8, stream), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(driver_->MemcpyAsync(Address(word), Address(view.data()), 8, stream), CUDA_SUCCESS);
  ASSERT_TRUE(Drains(stream));
  EXPECT_EQ(*word, 0x0101010101010101u);
}

TEST_P(DriverTest, TheHostReadsBackWhatItWritesToASlab) {
  const std::unique_ptr<CudaDevice> device = world_->Make();
  ExpectHostReadsBackWhatItWrites(device->memory());
}

TEST_P(DriverTest, ASlabOfTwoPiecesIsCopiedOverItsEdge) {
  const std::unique_ptr<CudaDevice> device = world_->Make();
  DeviceMemory* const memory = device->memory();
  const int64_t page = *memory->PageBytes();
  const std::unique_ptr<DeviceSlab> slab = *memory->MakeSpreadSlab("slab", {{memory, page}, {memory, page}}, {memory});
  ASSERT_EQ(slab->pieces().size(), 2u);
  std::vector<char> bytes(static_cast<size_t>(2 * page)), read(bytes.size(), 'x');
  ASSERT_TRUE(memory->Read(read.data(), slab->data(), 2 * page).ok());
  EXPECT_TRUE(read == bytes) << "new memory is not zero";
  std::iota(bytes.begin(), bytes.end(), 1);
  ASSERT_TRUE(memory->Write(slab->data(), bytes.data(), 2 * page).ok());
  ASSERT_TRUE(memory->Copy({{slab->data() + page - 50, slab->data() + 1, 100}}).ok());
  ASSERT_TRUE(memory->Read(read.data(), slab->data(), 2 * page).ok());
  std::copy_n(bytes.begin() + page - 50, 100, bytes.begin() + 1);
  EXPECT_TRUE(read == bytes);
}

TEST_P(DriverTest, ASlabWithAHoleIsUsableOnBothSides) {
  const int64_t page = *CudaSlab::Granularity(driver_, 0);
  const std::vector<CudaSlab::Piece> pieces = {{0, page}, {CudaSlab::kHole, 3 * page}, {0, 2 * page}};
  absl::StatusOr<CudaSlab> slab = CudaSlab::CreateSpread(&driver_, pieces, "slab shards of job a", {0});
  ASSERT_TRUE(slab.ok()) << slab.status();
  EXPECT_EQ(slab->size_bytes(), 6 * page);
  std::vector<size_t> with_memory = {0, 2};
  absl::StatusOr<CudaSlab> imported = CudaSlab::ImportSpread(
      &driver_, 0, {page, -3 * page, 2 * page},
      [&, next = size_t{0}]() mutable { return slab->ExportFd(with_memory[next++]); }, CudaSlab::Access::kReadWrite,
      "slab shards of job a");
  ASSERT_TRUE(imported.ok()) << imported.status();
  auto* const word = Word(17);
  const CUstream stream = Stream();
  const auto at = [page](const CudaSlab& of, int64_t pages) {
    return Address(static_cast<const char*>(of.data()) + pages * page);
  };
  ASSERT_EQ(driver_->MemcpyAsync(at(*slab, 5), Address(word), 8, stream), CUDA_SUCCESS);
  ASSERT_EQ(driver_->MemcpyAsync(at(*imported, 0), at(*imported, 5), 8, stream), CUDA_SUCCESS);
  ASSERT_TRUE(Drains(stream));
  *word = 0;
  ASSERT_EQ(driver_->MemcpyAsync(Address(word), at(*slab, 0), 8, stream), CUDA_SUCCESS);
  ASSERT_TRUE(Drains(stream));
  EXPECT_EQ(Load(word), 17u);
}

TEST_P(DriverTest, RegisteredMemoryIsCopiedAtTheHostsAddresses) {
  const std::unique_ptr<CudaDevice> device = world_->Make();
  DeviceMemory* const memory = device->memory();
  const std::unique_ptr<DeviceSlab> slab = *memory->MakeSlab("slab", 4096, {memory});
  std::vector<char> host(40000, 'a');
  for (int round = 0; round < 2; ++round) {  // what is given up can be registered again
    const auto registered = memory->RegisterHost("slab \"shards\"", host.data(), 40000, {memory});
    ASSERT_TRUE(registered.ok()) << registered.status();
    const auto again = memory->RegisterHost("slab \"shards\"", host.data() + 20000, 100, {memory});
    EXPECT_FALSE(again.ok());
    EXPECT_THAT(std::string(again.status().message()),
                HasSubstr("cuMemHostRegister slab \"shards\", 100 bytes: CUDA_ERROR_HOST_MEMORY_ALREADY"));
    ASSERT_TRUE(memory->Zero(slab->data(), 4096).ok());
    ASSERT_TRUE(memory->Copy({{host.data() + 7, slab->data(), 4096}}).ok());
    ASSERT_TRUE(memory->Zero(host.data() + 8000, 50).ok());
    ASSERT_TRUE(memory->Copy({{slab->data(), host.data() + 8010, 10}}).ok());
  }
  EXPECT_EQ(std::string(host.data() + 8000, 51),
            std::string(10, '\0') + std::string(10, 'a') + std::string(30, '\0') + "a");
}

// Pages of a session: a memfd, mapped by two processes, which both register it.
TEST_P(DriverTest, WordsOfAMappedRegisteredFileCanBeAwaited) {
  const UniqueFd fd(memfd_create("page", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(fd.get(), 4096), 0);
  auto* const ours = static_cast<uint64_t*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0));
  auto* const theirs = static_cast<uint64_t*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0));
  for (uint64_t* page : {ours, theirs}) {
    ASSERT_EQ(driver_->MemHostRegister(page, 4096, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
              CUDA_SUCCESS);
  }
  const CUstream stream = Stream();
  ASSERT_EQ(driver_->StreamWaitValue64(stream, Address(theirs), 3, CU_STREAM_WAIT_VALUE_GEQ), CUDA_SUCCESS);
  ASSERT_EQ(driver_->StreamWriteValue64(stream, Address(ours + 8), 4, CU_STREAM_WRITE_VALUE_DEFAULT), CUDA_SUCCESS);
  EXPECT_EQ(driver_->StreamQuery(stream), CUDA_ERROR_NOT_READY);
  __atomic_store_n(ours, 3, __ATOMIC_RELEASE);
  EXPECT_TRUE(Drains(stream));
  EXPECT_EQ(Load(theirs + 8), 4u);
  for (uint64_t* page : {ours, theirs}) {
    EXPECT_EQ(driver_->MemHostUnregister(page), CUDA_SUCCESS);
    munmap(page, 4096);
  }
}

TEST_P(DriverTest, AWorkOfAnyLengthRunsInOrder) {
  const std::unique_ptr<CudaDevice> device = world_->Make({.max_queued_calls = 32});
  auto* const chain = static_cast<float*>(world_->memory()->allocate(5001 * sizeof(float), 16));
  std::fill_n(chain, 5001, 0.0f);
  chain[0] = 42;
  DeviceWork work;
  for (int i = 0; i < 5000; ++i) {  // kernels: copies between memory of the host hold the caller up
    work.ops.emplace_back(ReduceOp{{chain + i}, v1::DTYPE_FLOAT32, v1::DTYPE_UNSPECIFIED, 1, false, chain + i + 1, 1});
  }
  std::atomic<bool> done = false;
  work.done = [&](absl::Status status) {
    EXPECT_TRUE(status.ok()) << status;
    done = true;
  };
  device->Submit(StreamId::kUnshard, std::move(work));
  EXPECT_TRUE(::shardd::testing::PollUntil([&] { return done.load(); }));
  EXPECT_EQ(chain[5000], 42.0f);
}

INSTANTIATE_TEST_SUITE_P(All, DriverTest, ::testing::ValuesIn(CudaKinds()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace shardd
