#include "common/tensor/norm.h"

#include <algorithm>
#include <cmath>

#include "common/tensor/isa_internal.h"
#include "common/tensor/kernels.h"

namespace shardd {
namespace {

// Independent sums per block; a fixed number, so that every machine adds in the same order.
inline constexpr int kLanes = 32;
inline constexpr int64_t kNormBlock = 4096;

// |x|^kPower
template <int kPower>
SHARDD_ALWAYS_INLINE double Power(float value) {
  const double x = static_cast<double>(value);
  if constexpr (kPower == 2) return x * x;
  [[maybe_unused]] const double magnitude = std::abs(x);
  if constexpr (kPower == 1) return magnitude;
  if constexpr (kPower == 3) return x * x * magnitude;
  return (x * x) * (x * x);
}

template <int kPower>
struct PowerSumBody {
  static SHARDD_ALWAYS_INLINE void Run(const float* src, int64_t numel, double* result) {
    double total = 0;
    for (int64_t block = 0; block < numel; block += kNormBlock) {
      const int64_t end = numel - block < kNormBlock ? numel : block + kNormBlock;
      double lanes[kLanes] = {};
      int64_t i = block;
      for (; i + kLanes <= end; i += kLanes) {
        for (int j = 0; j < kLanes; ++j) lanes[j] += Power<kPower>(src[i + j]);
      }
      for (int j = 0; i < end; ++i, ++j) lanes[j] += Power<kPower>(src[i]);
      for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
      }
      total += lanes[0];
    }
    *result = total;
  }
};

// NaN if any element is NaN.
struct LargestBody {
  static SHARDD_ALWAYS_INLINE void Run(const float* src, int64_t numel, double* result) {
    float lanes[kLanes] = {};
    float unordered[kLanes] = {};  // 0, or NaN after a NaN; x - x would be NaN for infinities too
    int64_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) {
      for (int j = 0; j < kLanes; ++j) {
        const float x = std::abs(src[i + j]);
        lanes[j] = x > lanes[j] ? x : lanes[j];
        unordered[j] = x == x ? unordered[j] : x;
      }
    }
    for (int j = 0; i < numel; ++i, ++j) {
      const float x = std::abs(src[i]);
      lanes[j] = x > lanes[j] ? x : lanes[j];
      unordered[j] = x == x ? unordered[j] : x;
    }
    float largest = 0;
    for (int j = 0; j < kLanes; ++j) {
      largest = lanes[j] > largest ? lanes[j] : largest;
    }
    for (int j = 0; j < kLanes; ++j) {
      if (unordered[j] != unordered[j]) largest = unordered[j];
    }
    *result = static_cast<double>(largest);
  }
};

template <typename Body>
double RunBody(const float* src, int64_t numel) {
  double result = 0;
  tensor::Select<Body, const float*, int64_t, double*>(tensor::CurrentIsa())(src, numel, &result);
  return result;
}

bool IsDirect(double p) { return p == 1 || p == 2 || p == 3 || p == 4; }

}  // namespace

double SquaredNorm(const float* src, int64_t numel) { return RunBody<PowerSumBody<2>>(src, numel); }

bool Norm::IsOrder(double p) { return p > 0; }

void Norm::Add(const float* src, int64_t numel) {
  if (numel <= 0) return;
  if (IsDirect(p_)) {
    AddScaled(1, p_ == 1   ? RunBody<PowerSumBody<1>>(src, numel)
                 : p_ == 2 ? SquaredNorm(src, numel)
                 : p_ == 3 ? RunBody<PowerSumBody<3>>(src, numel)
                           : RunBody<PowerSumBody<4>>(src, numel));
    return;
  }
  if (std::isinf(p_)) {
    AddScaled(RunBody<LargestBody>(src, numel), 1);
    return;
  }
  for (int64_t block = 0; block < numel; block += kNormBlock) {
    const int64_t count = std::min(kNormBlock, numel - block);
    const double largest = RunBody<LargestBody>(src + block, count);
    double sum = 1;
    if (std::isfinite(largest)) {
      if (largest == 0) continue;
      sum = 0;
      for (int64_t i = 0; i < count; ++i) {
        sum += std::pow(std::abs(static_cast<double>(src[block + i])) / largest, p_);
      }
    }
    AddScaled(largest, sum);
  }
}

void Norm::Add(const Norm& other) { AddScaled(other.scale_, other.sum_); }

void Norm::set_state(const NormState& state) {
  scale_ = state.scale;
  sum_ = state.sum;
}

void Norm::AddScaled(double scale, double sum) {
  if (IsDirect(p_)) {
    scale_ = 1;
    sum_ += sum;
    return;
  }
  if (scale == 0 || std::isnan(scale_)) return;
  if (!std::isfinite(scale) || !std::isfinite(scale_) || std::isinf(p_)) {
    scale_ = scale > scale_ || std::isnan(scale) ? scale : scale_;
    sum_ = 1;
    return;
  }
  if (scale > scale_) {
    sum_ = scale_ == 0 ? sum : sum_ * std::pow(scale_ / scale, p_) + sum;
    scale_ = scale;
  } else {
    sum_ += sum * std::pow(scale / scale_, p_);
  }
}

double Norm::value() const {
  if (p_ == 1) return sum_;
  if (p_ == 2) return std::sqrt(sum_);
  if (IsDirect(p_)) return std::pow(sum_, 1 / p_);
  return std::isinf(p_) || !std::isfinite(scale_) || scale_ == 0 ? scale_ : scale_ * std::pow(sum_, 1 / p_);
}

}  // namespace shardd
