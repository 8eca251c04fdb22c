#ifndef SHARDD_TESTS_COMMON_TENSOR_ISA_TEST_UTIL_H_
#define SHARDD_TESTS_COMMON_TENSOR_ISA_TEST_UTIL_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/tensor/isa.h"
#include "common/tensor/kernels.h"

namespace shardd {

// Runs a test once for each level that kernels are compiled for.
class IsaTest : public ::testing::TestWithParam<tensor::Isa> {
 protected:
  void SetUp() override {
    if (GetParam() > tensor::BestIsa()) GTEST_SKIP() << "this machine has no such instructions";
    tensor::SetIsaForTest(GetParam());
  }
  void TearDown() override { tensor::SetIsaForTest(tensor::BestIsa()); }
};

inline std::string IsaName(const ::testing::TestParamInfo<tensor::Isa>& info) {
  return info.param == tensor::Isa::kBase ? "Base" : info.param == tensor::Isa::kAvx2 ? "Avx2" : "Avx512";
}

#define SHARDD_FOR_EACH_ISA(suite)      \
  INSTANTIATE_TEST_SUITE_P(Isas, suite, \
                           ::testing::Values(tensor::Isa::kBase, tensor::Isa::kAvx2, tensor::Isa::kAvx512), IsaName)

// Normal values around 1, the same on every run.
inline std::vector<float> Randoms(int64_t numel, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> result(static_cast<size_t>(numel));
  for (float& x : result) x = normal(random);
  return result;
}

template <typename To, typename From>
To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// `values` rounded to a 16-bit dtype, as its storage.
inline std::vector<uint16_t> As16Bit(const std::vector<float>& values, DType dtype) {
  std::vector<uint16_t> result(values.size());
  Cast(values.data(), v1::DTYPE_FLOAT32, result.data(), dtype, static_cast<int64_t>(values.size()));
  return result;
}

inline std::vector<float> AsFloat(const std::vector<uint16_t>& values, DType dtype) {
  std::vector<float> result(values.size());
  Cast(values.data(), dtype, result.data(), v1::DTYPE_FLOAT32, static_cast<int64_t>(values.size()));
  return result;
}

}  // namespace shardd

#endif  // SHARDD_TESTS_COMMON_TENSOR_ISA_TEST_UTIL_H_
