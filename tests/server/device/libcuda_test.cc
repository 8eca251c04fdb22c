// The fake driver as a library that programs find: what processes share through it, and what they cannot do to each
// other. In process it is fake_cuda_test.cc.

#include <errno.h>
#include <signal.h>

#include <thread>

#include "server/device/cuda/kernels.h"
#include "server/job/wait.h"
#include "tests/server/device/libcuda_program.h"
#include "tests/testing/files.h"

namespace shardd {
namespace {

using Access = CudaSlab::Access;
using ::shardd::testing::Child;
using ::shardd::testing::PollUntil;

constexpr int64_t kBytes = 4 << 20;
constexpr uint64_t Value(uint64_t epoch, uint64_t sequence) { return epoch << 40 | sequence; }

TEST_F(LibcudaTest, ProcessesShareAnAllocationByItsDescriptorAlone) {
  Child owner = Start(1, {{"FAKE_CUDA_DEVICES", "2"}}, [&](Program& program) {
    const CudaSlab slab = *CudaSlab::Create(&program.driver(), 1, kBytes, "slab");
    const CUdeviceptr last = Address(slab.data()) + kBytes - 8;
    program.Write(last, 7);
    SHARDD_REQUIRE(program.Synchronise() == CUDA_SUCCESS);
    {
      const UniqueFd fd = *slab.ExportFd();
      SHARDD_REQUIRE(ftruncate(fd.get(), 4096) != 0 && errno == EPERM);  // no size changes under who has it mapped
      Send(fd.get());
    }
    SHARDD_REQUIRE(Reaches(1));
    SHARDD_REQUIRE(program.Read(last, 0) == 8);
  });
  Child importer = Start(0, {{"FAKE_CUDA_DEVICES", "2"}}, [&](Program& program) {
    UniqueFd fd = Receive();
    // For GPU 0, of what is GPU 1's.
    const CudaSlab slab = *CudaSlab::Import(&program.driver(), 0, fd.get(), kBytes, Access::kReadWrite, "slab");
    fd.reset();
    const CUdeviceptr last = Address(slab.data()) + kBytes - 8;
    SHARDD_REQUIRE(program.Read(last, 1) == 7);
    program.Write(last, 8);
    SHARDD_REQUIRE(program.Synchronise() == CUDA_SUCCESS);
    // Access is each GPU's own, whoever the memory belongs to.
    const CUstream other = program.StreamOf(1);
    SHARDD_REQUIRE(program.driver()->StreamWriteValue64(other, last, 9, 0) == CUDA_ERROR_INVALID_VALUE);
    Reached(1);
  });
  EXPECT_EQ(importer.Wait(), 0);
  EXPECT_EQ(owner.Wait(), 0);
}

TEST_F(LibcudaTest, WritingThroughAReadOnlyMapEndsTheWriterAlone) {
  Child owner = Start(0, {}, [&](Program& program) {
    const CudaSlab slab = *CudaSlab::Create(&program.driver(), 0, kBytes, "slab");
    program.Write(Address(slab.data()), 7);
    SHARDD_REQUIRE(program.Synchronise() == CUDA_SUCCESS);
    for (int i = 0; i < 2; ++i) Send(slab.ExportFd()->get());
    SHARDD_REQUIRE(Reaches(1));
    SHARDD_REQUIRE(program.Read(Address(slab.data()), 0) == 7);  // its own context is fine
  });
  const auto import_read_only = [&](Program& program) {
    const UniqueFd fd = Receive();
    return *CudaSlab::Import(&program.driver(), 0, fd.get(), kBytes, Access::kReadOnly, "slab");
  };
  Child by_host = Start(0, {}, [&](Program& program) {
    const CudaSlab slab = import_read_only(program);
    SHARDD_REQUIRE(program.Read(Address(slab.data()), 1) == 7);
    signal(SIGSEGV, SIG_DFL);  // past a sanitizer's handler, whose report would count
    *static_cast<volatile uint64_t*>(slab.data()) = 8;
  });
  EXPECT_EQ(by_host.Wait(), 1000 + SIGSEGV);
  Child by_stream = Start(0, {}, [&](Program& program) {
    const CudaSlab slab = import_read_only(program);
    const CudaDriver& driver = program.driver();
    SHARDD_REQUIRE(driver->MemsetD8Async(Address(slab.data()), 1, 8, program.stream()) == CUDA_ERROR_INVALID_VALUE);
    SHARDD_REQUIRE(program.Synchronise() == CUDA_SUCCESS);
    // What the call does not see, a kernel's write.
    CUlibrary library = nullptr;
    CUkernel cast = nullptr;
    SHARDD_REQUIRE(driver->LibraryLoadData(&library, driver.kernels().data(), nullptr, nullptr, 0, nullptr, nullptr,
                                           0) == CUDA_SUCCESS);
    SHARDD_REQUIRE(driver->LibraryGetKernel(&cast, library, cuda::kCastKernel) == CUDA_SUCCESS);
    cuda::CastArgs args = {slab.data(), slab.data(), 1, cuda::kFloat32, cuda::kBFloat16, 1};
    void* params[] = {&args};
    SHARDD_REQUIRE(driver->LaunchKernel(cu::FunctionOf(cast), 1, 1, 1, 32, 1, 1, 0, program.stream(), params,
                                        nullptr) == CUDA_SUCCESS);
    SHARDD_REQUIRE(program.Synchronise() == CUDA_ERROR_ILLEGAL_ADDRESS);
    // Sticky: the context is gone, in this process.
    SHARDD_REQUIRE(program.driver()->StreamQuery(program.stream()) == CUDA_ERROR_ILLEGAL_ADDRESS);
  });
  EXPECT_EQ(by_stream.Wait(), 0);
  Reached(1);
  EXPECT_EQ(owner.Wait(), 0);
}

TEST_F(LibcudaTest, StreamsWaitForWhatStreamsOfOtherProcessesWrite) {
  Child waiting = Start(0, {}, [&](Program& program) {
    program.Wait(0, Value(1, 5));
    program.Write(Address(program.word(1)), 1);
    Reached(1);
    SHARDD_REQUIRE(Reaches(2));
    SHARDD_REQUIRE(!program.Idle() && program.Load(1) == 0);  // (1, 4) has been written, which is not enough
    Reached(3);
    SHARDD_REQUIRE(program.Synchronise() == CUDA_SUCCESS && program.Load(0) == Value(2, 0));
    // Across the end of the 64 bits: what is far ahead counts as behind, and what was before the end as reached.
    program.Wait(2, Value(0, 3));
    program.Wait(3, Value(1, 0));
    Reached(4);
    SHARDD_REQUIRE(Reaches(5));
    SHARDD_REQUIRE(!program.Idle());
    Reached(6);
    SHARDD_REQUIRE(program.Synchronise() == CUDA_SUCCESS);
  });
  Child signalling = Start(0, {}, [&](Program& program) {
    const auto write = [&](int i, uint64_t value) {
      program.Write(Address(program.word(i)), value);
      SHARDD_REQUIRE(program.Synchronise() == CUDA_SUCCESS);
    };
    SHARDD_REQUIRE(Reaches(1));
    write(0, Value(1, 4));
    Reached(2);
    SHARDD_REQUIRE(Reaches(3));
    write(0, Value(2, 0));  // a new epoch: every older wait is over, whatever sequence it was for
    SHARDD_REQUIRE(Reaches(4));
    write(3, uint64_t{1} << 63 | Value(1, 1));
    write(2, uint64_t{1} << 63 | Value(0, 3));  // 2^63 ahead
    Reached(5);
    SHARDD_REQUIRE(Reaches(6));
    write(2, Value(0, 3));
    write(3, uint64_t{1} << 63);  // 2^63 - 2^40 ahead
  });
  EXPECT_EQ(signalling.Wait(), 0);
  EXPECT_EQ(waiting.Wait(), 0);
}

TEST_F(LibcudaTest, AnAllocationOutlivesItsOwnerAndThoseWhoMapIt) {
  Child owner = Start(0, {}, [&](Program& program) {
    const CudaSlab slab = *CudaSlab::Create(&program.driver(), 0, kBytes, "slab");
    program.Write(Address(slab.data()), 7);
    SHARDD_REQUIRE(program.Synchronise() == CUDA_SUCCESS);
    for (int i = 0; i < 2; ++i) Send(slab.ExportFd()->get());
    SHARDD_REQUIRE(Reaches(2));
    SHARDD_REQUIRE(program.Read(Address(slab.data()), 0) == 8);
    Reached(3);
    pause();
  });
  Child killed = Start(0, {}, [&](Program& program) {
    const UniqueFd fd = Receive();
    const CudaSlab slab = *CudaSlab::Import(&program.driver(), 0, fd.get(), kBytes, Access::kReadWrite, "slab");
    program.Write(Address(slab.data()), 8);
    SHARDD_REQUIRE(program.Synchronise() == CUDA_SUCCESS);
    program.Wait(1, 1);  // for ever
    program.Write(Address(slab.data()), 9);
    Reached(1);
    pause();
  });
  ASSERT_TRUE(Reaches(1));
  killed.Kill(SIGKILL);
  EXPECT_EQ(killed.Wait(), 1000 + SIGKILL);
  Reached(2);
  ASSERT_TRUE(Reaches(3));
  owner.Kill(SIGKILL);
  EXPECT_EQ(owner.Wait(), 1000 + SIGKILL);
  Child heir = Start(0, {}, [&](Program& program) {
    const UniqueFd fd = Receive();
    const CudaSlab slab = *CudaSlab::Import(&program.driver(), 0, fd.get(), kBytes, Access::kReadOnly, "slab");
    SHARDD_REQUIRE(program.Read(Address(slab.data()), 2) == 8);
  });
  EXPECT_EQ(heir.Wait(), 0);
}

TEST_F(LibcudaTest, AKilledProcessStillWritesItsStreamsCurrentWord) {
  const ::shardd::testing::TempDir folder;
  Child killed = Start(0, {{"FAKE_CUDA_HOLD_WRITES_FILE", folder.File("hold")}}, [&](Program& program) {
    program.Write(Address(program.word(0)), 6);
    SHARDD_REQUIRE(program.Synchronise() == CUDA_SUCCESS && program.Load(0) == 6);
    folder.Write("hold", "");
    program.Write(Address(program.word(0)), 7);
    program.Write(Address(program.word(1)), 8);  // behind it, so it dies with the process
    SHARDD_REQUIRE(PollUntil([&] { return access(folder.File("hold.held").c_str(), F_OK) == 0; }));
    Reached(1);
    pause();
  });
  ASSERT_TRUE(Reaches(1));
  killed.Kill(SIGKILL);
  EXPECT_EQ(killed.Wait(), 1000 + SIGKILL);
  Child other = Start(0, {}, [&](Program& program) {
    SHARDD_REQUIRE(program.Load(0) == 6);
    program.Wait(0, 7);
    SHARDD_REQUIRE(unlink(folder.File("hold").c_str()) == 0);
    SHARDD_REQUIRE(PollUntil([&] { return program.Idle(); }));
    SHARDD_REQUIRE(program.Load(0) == 7 && program.Load(1) == 0);
  });
  EXPECT_EQ(other.Wait(), 0);
}

TEST_F(LibcudaTest, LateWritesComeInTheOrderOfTheirStream) {
  Child child = Start(0, {{"FAKE_CUDA_LATE_WRITES_US", "1000"}}, [&](Program& program) {
    for (uint64_t i = 1; i <= 20; ++i) {
      program.Write(Address(program.word(0)), i);
      SHARDD_REQUIRE(program.driver()->MemcpyAsync(Address(program.word(static_cast<int>(i))), Address(program.word(0)),
                                                   8, program.stream()) == CUDA_SUCCESS);
    }
    SHARDD_REQUIRE(program.Synchronise() == CUDA_SUCCESS);
    for (int i = 1; i <= 20; ++i) SHARDD_REQUIRE(program.Load(i) == static_cast<uint64_t>(i));
  });
  EXPECT_EQ(child.Wait(), 0);
}

TEST_F(LibcudaTest, LosingAGpuEndsTheWaitsOfAllItsProcesses) {
  const ::shardd::testing::TempDir folder;
  const Environment environment = {{"FAKE_CUDA_DEVICES", "2"}, {"FAKE_CUDA_LOSE_FILE", folder.File("lost")}};
  const auto run = [&](int gpu, CUresult want) {
    return Start(gpu, environment, [&, gpu, want](Program& program) {
      program.Wait(gpu, 1);
      stage_->fetch_add(1);
      SHARDD_REQUIRE(program.Synchronise() == want);
    });
  };
  Child first = run(0, CUDA_ERROR_ECC_UNCORRECTABLE), second = run(0, CUDA_ERROR_ECC_UNCORRECTABLE),
        other = run(1, CUDA_SUCCESS);
  ASSERT_TRUE(Reaches(3));
  folder.Write("lost", "0 214\n");
  EXPECT_EQ(first.Wait(), 0);
  EXPECT_EQ(second.Wait(), 0);
  EXPECT_FALSE(other.Ended());
  Child release = Start(1, environment, [&](Program& program) {
    program.Write(Address(program.word(1)), 1);
    SHARDD_REQUIRE(program.Synchronise() == CUDA_SUCCESS);
  });
  EXPECT_EQ(release.Wait(), 0);
  EXPECT_EQ(other.Wait(), 0);
}

TEST_F(LibcudaTest, AForkedChildDoesNotHaveTheDriver) {
  Child parent = Start(0, {}, [&](Program& program) {
    Child child([&] {
      int count = 0;
      SHARDD_REQUIRE(program.driver()->DeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED);
      SHARDD_REQUIRE(program.driver()->Init(0) == CUDA_ERROR_NOT_INITIALIZED);
      return 0;
    });
    SHARDD_REQUIRE(child.Wait() == 0);
  });
  EXPECT_EQ(parent.Wait(), 0);
}

TEST_F(LibcudaTest, TheEnvironmentDescribesTheMachine) {
  Child child = Start(
      0, {{"FAKE_CUDA_DEVICES", "3"}, {"FAKE_CUDA_MEMORY_BYTES", "8388608"}, {"FAKE_CUDA_FAIL", "cuMemMap:2:999"}},
      [&](Program& program) {
        int count = 0;
        SHARDD_REQUIRE(program.driver()->DeviceGetCount(&count) == CUDA_SUCCESS && count == 3);
        SHARDD_REQUIRE(CudaSlab::Create(&program.driver(), 0, 8 << 20, "slab").ok());
        const absl::Status failed = CudaSlab::Create(&program.driver(), 0, 8 << 20, "slab").status();
        SHARDD_REQUIRE(failed.code() == absl::StatusCode::kDataLoss);  // the second cuMemMap
        const absl::Status full = CudaSlab::Create(&program.driver(), 0, 16 << 20, "slab").status();
        SHARDD_REQUIRE(full.code() == absl::StatusCode::kResourceExhausted);
      });
  EXPECT_EQ(child.Wait(), 0);
  Child wrong = Start(0, {{"FAKE_CUDA_DEVICES", "two"}}, [](Program&) {});
  EXPECT_EQ(wrong.Wait(), 1);
}

}  // namespace
}  // namespace shardd
