#ifndef SHARDD_TESTS_SERVER_DEVICE_LIBCUDA_PROGRAM_H_
#define SHARDD_TESTS_SERVER_DEVICE_LIBCUDA_PROGRAM_H_

// Processes that have found the fake libcuda.so.1 as any program finds a driver, and what they say to one another
// beside it: a page, a memfd whose words each maps and registers for itself, a socket for descriptors.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/cuda/driver.h"
#include "common/cuda/slab.h"
#include "common/shm/unique_fd.h"
#include "tests/testing/build_paths.h"
#include "tests/testing/poll.h"
#include "tests/testing/process.h"

namespace shardd {

// Ends the process that calls it, which its parent then sees.
inline void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "process %d: not so: %s\n", getpid(), what);
  _exit(99);
}
#define SHARDD_REQUIRE(condition) ::shardd::Require(condition, #condition)

inline CUdeviceptr Address(const void* p) { return reinterpret_cast<CUdeviceptr>(p); }

// Of one process: the driver, a context and a stream of one GPU, the words.
class Program {
 public:
  Program(int gpu, int words_fd) : driver_(*CudaDriver::Load(built::kFakesDir + "/libcuda.so.1")) {
    stream_ = StreamOf(gpu);
    void* const page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, words_fd, 0);
    SHARDD_REQUIRE(page != MAP_FAILED);
    SHARDD_REQUIRE(driver_->MemHostRegister(page, 4096, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP) ==
                   CUDA_SUCCESS);
    words_ = static_cast<uint64_t*>(page);
  }
  const CudaDriver& driver() const { return driver_; }
  CUstream stream() const { return stream_; }
  // A new stream; the GPU's context is current from then on.
  CUstream StreamOf(int gpu) {
    CUcontext context = nullptr;
    CUstream stream = nullptr;
    SHARDD_REQUIRE(driver_->DevicePrimaryCtxRetain(&context, gpu) == CUDA_SUCCESS);
    SHARDD_REQUIRE(driver_->CtxSetCurrent(context) == CUDA_SUCCESS);
    SHARDD_REQUIRE(driver_->StreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0) == CUDA_SUCCESS);
    return stream;
  }
  // The same memory in every process of the test, registered in each.
  uint64_t* word(int i) const { return words_ + i; }
  uint64_t Load(int i) const { return __atomic_load_n(words_ + i, __ATOMIC_ACQUIRE); }

  void Write(CUdeviceptr address, uint64_t value) {
    SHARDD_REQUIRE(driver_->StreamWriteValue64(stream_, address, value, CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS);
  }
  void Wait(int i, uint64_t value) {
    SHARDD_REQUIRE(driver_->StreamWaitValue64(stream_, Address(word(i)), value, CU_STREAM_WAIT_VALUE_GEQ) ==
                   CUDA_SUCCESS);
  }
  bool Idle() const { return driver_->StreamQuery(stream_) == CUDA_SUCCESS; }
  CUresult Synchronise() { return driver_->StreamSynchronize(stream_); }
  // Eight bytes of a GPU's memory, by way of the stream and word `i`.
  uint64_t Read(CUdeviceptr address, int i) {
    SHARDD_REQUIRE(driver_->MemcpyAsync(Address(word(i)), address, 8, stream_) == CUDA_SUCCESS);
    SHARDD_REQUIRE(Synchronise() == CUDA_SUCCESS);
    return Load(i);
  }

 private:
  const CudaDriver driver_;
  CUstream stream_ = nullptr;
  uint64_t* words_ = nullptr;
};

class LibcudaTest : public ::testing::Test {
 protected:
  using Environment = std::vector<std::pair<std::string, std::string>>;

  LibcudaTest() : words_fd_(memfd_create("words", MFD_CLOEXEC)) {
    stage_ =
        static_cast<std::atomic<int>*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    EXPECT_EQ(ftruncate(words_fd_.get(), 4096), 0);
    int ends[2] = {-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    near_.reset(ends[0]);
    far_.reset(ends[1]);
  }
  ~LibcudaTest() override { munmap(stage_, 4096); }

  // A process of its own, with the driver loaded after its environment was set.
  ::shardd::testing::Child Start(int gpu, const Environment& environment, const std::function<void(Program&)>& body) {
    return ::shardd::testing::Child([&] {
      for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
      Program program(gpu, words_fd_.get());
      body(program);
      return 0;
    });
  }
  // What the processes have come to, in the order of the test.
  void Reached(int stage) { stage_->store(stage); }
  bool Reaches(int stage) const {
    return ::shardd::testing::PollUntil([&] { return stage_->load() >= stage; });
  }
  void Send(int fd) const {
    OneDescriptor sent;
    cmsghdr* const header = CMSG_FIRSTHDR(&sent.message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
    SHARDD_REQUIRE(sendmsg(near_.get(), &sent.message, 0) == 1);
  }
  UniqueFd Receive() const {
    OneDescriptor received;
    SHARDD_REQUIRE(recvmsg(far_.get(), &received.message, MSG_CMSG_CLOEXEC) == 1);
    const cmsghdr* const header = CMSG_FIRSTHDR(&received.message);
    SHARDD_REQUIRE(header != nullptr && header->cmsg_type == SCM_RIGHTS);
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
    return UniqueFd(fd);
  }

  // A message of one byte, with room for a descriptor.
  struct OneDescriptor {
    OneDescriptor() {
      message.msg_iov = &bytes;
      message.msg_iovlen = 1;
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
    }
    char byte = 'm';
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    iovec bytes = {&byte, 1};
    msghdr message = {};
  };

  UniqueFd words_fd_, near_, far_;
  std::atomic<int>* stage_ = nullptr;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_DEVICE_LIBCUDA_PROGRAM_H_
