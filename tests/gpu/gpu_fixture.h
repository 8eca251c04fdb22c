#ifndef SHARDD_TESTS_GPU_GPU_FIXTURE_H_
#define SHARDD_TESTS_GPU_GPU_FIXTURE_H_

#include <gtest/gtest.h>

#include <string>

#include "common/tensor/kernels.h"
#include "tests/gpu/gpu.h"

namespace shardd::cuda {

// Of the first GPU; skipped, by reason, where there is none. Then gpu_ is null.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    gpu_ = Gpu::Get(&why);
    if (gpu_ == nullptr) GTEST_SKIP() << why;
  }

  Gpu* gpu_ = nullptr;
};

// Of the first step, as PyTorch's defaults are.
inline AdamWParams UsualAdamW() {
  AdamWParams params = {};
  params.lr = 1e-3;
  params.beta1 = 0.9;
  params.beta2 = 0.999;
  params.eps = 1e-8;
  params.step = 1;
  return params;
}

}  // namespace shardd::cuda

#endif  // SHARDD_TESTS_GPU_GPU_FIXTURE_H_
