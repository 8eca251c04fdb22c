#ifndef SHARDD_TESTS_SERVER_DEVICE_KERNEL_RUNNER_H_
#define SHARDD_TESTS_SERVER_DEVICE_KERNEL_RUNNER_H_

// One suite for the CUDA kernels, kernel_*_test.cc, against the CPU kernels. In server_device_test what a thread of a
// kernel does is compiled for the host and run for one thread after the other; tests/gpu runs the kernels themselves.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <variant>

#include "server/device/cuda/kernels.h"

namespace shardd::cuda {

using AnyArgs = std::variant<CastArgs, ReduceArgs, NormArgs, FiniteArgs, AdamWArgs, SgdArgs, RuleArgs>;

// Every call waits for its own end.
class KernelRunner {
 public:
  virtual ~KernelRunner() = default;
  // Memory for kernels, aligned to 256 bytes; given back with the runner.
  virtual char* Allocate(int64_t size_bytes) = 0;
  virtual void Write(const void* host, void* to, int64_t size_bytes) = 0;
  virtual void Read(const void* from, void* host, int64_t size_bytes) = 0;
  // grid 0: as GeometryOf says. A norm runs both its kernels.
  virtual void Launch(const AnyArgs& args, uint32_t grid = 0) = 0;
};

// nullptr: these tests cannot run here, and *why says what is missing.
std::unique_ptr<KernelRunner> MakeKernelRunner(std::string* why);

class KernelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    runner_ = MakeKernelRunner(&why);
    if (runner_ == nullptr) GTEST_SKIP() << why;
  }
  std::unique_ptr<KernelRunner> runner_;
};

}  // namespace shardd::cuda

#endif  // SHARDD_TESTS_SERVER_DEVICE_KERNEL_RUNNER_H_
