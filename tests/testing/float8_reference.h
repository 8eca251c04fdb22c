#ifndef SHARDD_TESTS_TESTING_FLOAT8_REFERENCE_H_
#define SHARDD_TESTS_TESTING_FLOAT8_REFERENCE_H_

// What ranks read of parameters that are gathered in float8, from the definition (common/tensor/float8_blocks.h): in
// double, with no bits of the codec.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace shardd::testing {

// The nearest float8 e4m3fn, ties to even; at most 448.
inline double NearestFloat8(double x) {
  if (!std::isfinite(x)) return std::numeric_limits<double>::quiet_NaN();
  if (x == 0) return x;
  const double quantum = std::ldexp(1.0, std::max(std::ilogb(x), -6) - 3);
  return std::copysign(std::min(448.0, std::fabs(std::nearbyint(x / quantum) * quantum)), x);
}

// `values` are one range of a node's part of a parameter, already of the dtype in which ranks read them, whose largest
// number is `limit`.
inline void RoundToFloat8(float* values, int64_t numel, double limit = std::numeric_limits<float>::max()) {
  for (int64_t first = 0; first < numel; first += 128) {
    float* const block = values + first;
    const int64_t count = std::min<int64_t>(128, numel - first);
    double largest = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (std::isfinite(block[i])) largest = std::max(largest, std::fabs(double{block[i]}));
    }
    double scale = std::ldexp(1.0, -126);
    while (largest > 448 * scale) scale *= 2;
    for (int64_t i = 0; i < count; ++i) {
      const double x = NearestFloat8(block[i] / scale) * scale;
      block[i] =
          std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(std::clamp(x, -limit, limit));
    }
  }
}

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_TESTING_FLOAT8_REFERENCE_H_
