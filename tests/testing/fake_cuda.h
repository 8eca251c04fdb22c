#ifndef SHARDD_TESTS_TESTING_FAKE_CUDA_H_
#define SHARDD_TESTS_TESTING_FAKE_CUDA_H_

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace shardd::testing {

// Tests of jobs on GPUs run on the fake driver; with SHARDD_TEST_GPU=real in the environment on the driver and the GPUs
// of this machine (tests/gpu/run.sh). Then the ranks of a job share what GPUs there are.
bool OnRealGpus();

// What makes a process that is started with it find `gpus` fake GPUs, where it looks for libcuda.so.1 itself or calls
// somebody who does; `more` is "FAKE_CUDA_X=value" (tests/fakes/cuda/README.md). On real GPUs nothing, and delays are
// theirs; REQUIRES there: `more` asks for nothing else (SHARDD_NEEDS_FAKE_GPUS).
std::vector<std::string> FakeCudaEnvironment(int gpus, const std::vector<std::string>& more = {});

// `gpus`, or what real ones there are where these are fewer.
int GpusAtMost(int gpus);

// Why a case that needs so many GPUs cannot run here; empty where it can.
std::string MissingGpus(int gpus);

}  // namespace shardd::testing

// At the beginning of a case: what it claims takes so many GPUs.
#define SHARDD_NEEDS_GPUS(gpus)                                                               \
  if (const std::string missing_ = ::shardd::testing::MissingGpus(gpus); !missing_.empty()) { \
    GTEST_SKIP() << missing_;                                                                 \
  }                                                                                           \
  static_assert(true, "")
// Likewise: it has the GPUs do what only the fake's are told to.
#define SHARDD_NEEDS_FAKE_GPUS(what)                                                                \
  if (::shardd::testing::OnRealGpus()) GTEST_SKIP() << "a real GPU is not told to do so: " << what; \
  static_assert(true, "")

#endif  // SHARDD_TESTS_TESTING_FAKE_CUDA_H_
