// Slabs on the fake driver: made, mapped, handed to other processes; what is left behind when a call fails. What needs
// nothing of a fake: driver_conformance_test.cc.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <optional>
#include <vector>

#include "common/cuda/slab.h"
#include "tests/fakes/cuda/machine.h"
#include "tests/testing/process.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;
using Access = CudaSlab::Access;

class CudaSlabTest : public ::testing::Test {
 protected:
  void Start(const fake_cuda::MachineOptions& options = {}) {
    machine_.emplace(options);
    ASSERT_EQ(driver_->Init(0), CUDA_SUCCESS);
  }
  absl::StatusOr<CudaSlab> Create(int64_t size_bytes, int gpu = 0) {
    return CudaSlab::Create(&driver_, gpu, size_bytes, "slab shards of job a");
  }

  std::optional<fake_cuda::Machine> machine_;
  const CudaDriver driver_{fake_cuda::Table()};
};

TEST_F(CudaSlabTest, NothingIsLeftWhateverCallFails) {
  Start();
  const CudaSlab exporter = *Create(1);
  const UniqueFd fd = *exporter.ExportFd();
  const auto before = machine_->live();
  for (const char* function : {"cuDeviceGetAttribute", "cuMemGetAllocationGranularity", "cuMemCreate",
                               "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
    machine_->FailCall(function, 1, CUDA_ERROR_OUT_OF_MEMORY);
    const absl::Status status = Create(1).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << function;
    EXPECT_THAT(std::string(status.message()), HasSubstr(function));
    EXPECT_THAT(std::string(status.message()), HasSubstr("CUDA_ERROR_OUT_OF_MEMORY: out of memory"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("device=cuda:0"));
    EXPECT_TRUE(machine_->live() == before) << function;
  }
  for (const char* function : {"cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
    machine_->FailCall(function, 1, CUDA_ERROR_UNKNOWN);
    EXPECT_FALSE(CudaSlab::Import(&driver_, 0, fd.get(), exporter.size_bytes(), Access::kReadOnly, "slab").ok());
    EXPECT_TRUE(machine_->live() == before) << function;
  }
}

constexpr int64_t kPage = 2 << 20;

class SpreadSlabTest : public CudaSlabTest {
 protected:
  void StartTwo(size_t bytes_per_gpu = size_t{64} << 20) {
    fake_cuda::MachineOptions options;
    options.gpus = 2;
    options.bytes_per_gpu = bytes_per_gpu;
    Start(options);
  }
  absl::StatusOr<CudaSlab> Spread(const std::vector<CudaSlab::Piece>& pieces) {
    return CudaSlab::CreateSpread(&driver_, pieces, "slab shards of job a", {0, 1});
  }
};

TEST_F(SpreadSlabTest, AnotherProcessMapsPiecesOnTwoGpusAsOneRange) {
  StartTwo();
  const auto before = machine_->live();
  {
    const CudaSlab slab = *Spread({{0, kPage}, {1, 2 * kPage}, {0, kPage}});
    ASSERT_EQ(slab.size_bytes(), 4 * kPage);
    ASSERT_EQ(slab.pieces(), 3u);
    EXPECT_EQ(machine_->live().memory.handles, before.memory.handles + 3);
    EXPECT_EQ(machine_->live().memory.reservations, before.memory.reservations + 1);
    char* const data = static_cast<char*>(slab.data());
    std::vector<UniqueFd> fds;
    for (size_t i = 0; i < 3; ++i) {
      std::snprintf(data + static_cast<int64_t>(i + 1) * kPage - 16, 32, "over the edge %zu", i);
      fds.push_back(*slab.ExportFd(i));
    }
    ::shardd::testing::Child child([&] {
      fake_cuda::MachineOptions two;
      two.gpus = 2;
      fake_cuda::Machine machine(two);
      const CudaDriver driver(fake_cuda::Table());
      if (driver->Init(0) != CUDA_SUCCESS) return 11;
      size_t next = 0;
      auto mapped = CudaSlab::ImportSpread(
          &driver, 1, {kPage, 2 * kPage, kPage}, [&]() -> absl::StatusOr<UniqueFd> { return std::move(fds[next++]); },
          Access::kReadWrite, "slab");
      if (!mapped.ok() || next != 3 || mapped->size_bytes() != 4 * kPage) return 12;
      char* const bytes = static_cast<char*>(mapped->data());
      if (std::strcmp(bytes + kPage - 16, "over the edge 0") != 0) return 13;
      if (std::strcmp(bytes + 3 * kPage - 16, "over the edge 2") != 0) return 14;
      std::strcpy(bytes + 3 * kPage - 8, "from the trainer");
      return 0;
    });
    EXPECT_EQ(child.Wait(), 0);
    EXPECT_STREQ(data + 3 * kPage - 8, "from the trainer");
  }
  EXPECT_TRUE(machine_->live() == before);
}

TEST_F(SpreadSlabTest, NothingIsLeftWhicheverCallFailsForWhicheverPiece) {
  StartTwo();
  const CudaSlab exporter = *Spread({{0, kPage}, {1, kPage}});
  const auto before = machine_->live();
  for (int nth = 1; nth <= 2; ++nth) {
    for (const char* function : {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemGetAllocationGranularity"}) {
      machine_->FailCall(function, nth, CUDA_ERROR_UNKNOWN);
      EXPECT_FALSE(Spread({{0, kPage}, {1, kPage}}).ok()) << function << " " << nth;
      EXPECT_TRUE(machine_->live() == before) << function << " " << nth;
    }
    for (const char* function : {"cuMemImportFromShareableHandle", "cuMemMap"}) {
      machine_->FailCall(function, nth, CUDA_ERROR_UNKNOWN);
      size_t next = 0;
      EXPECT_FALSE(
          CudaSlab::ImportSpread(
              &driver_, 0, {kPage, kPage}, [&] { return exporter.ExportFd(next++); }, Access::kReadOnly, "slab")
              .ok());
      EXPECT_TRUE(machine_->live() == before) << function << " " << nth;
    }
  }
  // Nor where descriptors end too early, or belong to a smaller piece.
  size_t next = 0;
  const auto one_only = [&]() -> absl::StatusOr<UniqueFd> {
    if (next++ > 0) return absl::UnavailableError("the daemon is gone");
    return exporter.ExportFd(0);
  };
  EXPECT_EQ(CudaSlab::ImportSpread(&driver_, 0, {kPage, kPage}, one_only, Access::kReadOnly, "slab").status(),
            absl::UnavailableError("the daemon is gone"));
  EXPECT_FALSE(CudaSlab::ImportSpread(
                   &driver_, 0, {kPage, 2 * kPage}, [&] { return exporter.ExportFd(1); }, Access::kReadOnly, "slab")
                   .ok());
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{}, {0}, {-kPage, kPage}, {int64_t{1} << 56, int64_t{1} << 56}}) {
    const absl::Status status = CudaSlab::ImportSpread(
                                    &driver_, 0, sizes, [&] { return exporter.ExportFd(); }, Access::kReadOnly, "slab")
                                    .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  }
  EXPECT_TRUE(machine_->live() == before);
}

TEST_F(SpreadSlabTest, TheGpuThatIsFullIsNamedWithThePiece) {
  StartTwo(/*bytes_per_gpu=*/8 << 20);
  const auto before = machine_->live();
  const absl::Status status = Spread({{0, kPage}, {1, 3 * kPage}, {0, kPage}, {1, 2 * kPage}}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("piece 3 of slab shards of job a, 4194304 of 14680064 bytes"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("device=cuda:1"));
  EXPECT_TRUE(machine_->live() == before);
  EXPECT_TRUE(Spread({{0, 4 * kPage}, {1, 4 * kPage}}).ok());
  EXPECT_EQ(Spread({{0, kPage}, {1, kPage / 2}}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(CudaSlabTest, AFullGpuIsNamedAndRoomComesBack) {
  fake_cuda::MachineOptions options;
  options.bytes_per_gpu = 8 << 20;
  Start(options);
  {
    const CudaSlab first = *Create(6 << 20);
    const absl::Status status = Create(4 << 20).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(status.message()), HasSubstr("slab shards of job a of 4194304 bytes"));
  }
  EXPECT_TRUE(Create(8 << 20).ok());
}

TEST_F(CudaSlabTest, WhatTheGpuDoesNotHaveIsNotAskedFor) {
  fake_cuda::MachineOptions options;
  options.rdma = false;
  Start(options);
  const auto slab = Create(1);
  ASSERT_TRUE(slab.ok()) << slab.status();
  EXPECT_FALSE(slab->gpu_direct_rdma());
}

TEST_F(CudaSlabTest, AGpuWithoutDescriptorsIsRefused) {
  fake_cuda::MachineOptions options;
  options.posix_fd = false;
  Start(options);
  const absl::Status status = Create(1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("POSIX descriptors"));
}

// The child has no threads of the parent's and a driver of its own, as any other process.
TEST_F(CudaSlabTest, TwoProcessesShareASlabByItsDescriptor) {
  Start();
  CudaSlab slab = *Create(3 << 20);
  char* const data = static_cast<char*>(slab.data());
  std::strcpy(data, "from the daemon");
  const UniqueFd fd = *slab.ExportFd();
  const int64_t size_bytes = slab.size_bytes();
  const auto in_child = [&](Access access, bool write) {
    ::shardd::testing::Child child([&] {
      const CudaDriver driver(fake_cuda::Table());
      if (driver->Init(0) != CUDA_ERROR_NOT_INITIALIZED) return 10;  // what was before fork does not count
      fake_cuda::Machine machine;
      if (driver->Init(0) != CUDA_SUCCESS) return 11;
      auto mapped = CudaSlab::Import(&driver, 0, fd.get(), size_bytes, access, "slab");
      if (!mapped.ok()) return 12;
      char* const bytes = static_cast<char*>(mapped->data());
      if (std::strcmp(bytes, "from the daemon") != 0) return 13;
      signal(SIGSEGV, SIG_DFL);  // past a sanitizer's handler, whose report would count
      if (write) std::strcpy(bytes + size_bytes - 64, "from the trainer");
      return 0;
    });
    return child.Wait();
  };
  EXPECT_EQ(in_child(Access::kReadOnly, false), 0);
  EXPECT_EQ(in_child(Access::kReadWrite, true), 0);
  EXPECT_STREQ(data + size_bytes - 64, "from the trainer");
  EXPECT_EQ(in_child(Access::kReadOnly, true), 1000 + SIGSEGV) << "a write through a read-only mapping must not pass";
}

TEST_F(CudaSlabTest, AProcessThatDoesNotSeeTheGpuCannotImport) {
  fake_cuda::MachineOptions two;
  two.gpus = 2;
  Start(two);
  const CudaSlab slab = *Create(1, 1);
  const UniqueFd fd = *slab.ExportFd();
  ::shardd::testing::Child child([&] {
    fake_cuda::Machine machine;
    const CudaDriver driver(fake_cuda::Table());
    (void)driver->Init(0);
    const absl::Status status =
        CudaSlab::Import(&driver, 0, fd.get(), slab.size_bytes(), Access::kReadOnly, "slab").status();
    return status.code() == absl::StatusCode::kFailedPrecondition ? 0 : 1;
  });
  EXPECT_EQ(child.Wait(), 0);
}

}  // namespace
}  // namespace shardd
