#include "common/tensor/isa_internal.h"
#include "common/tensor/kernels.h"

namespace shardd {
namespace {

// Independent sums per block; a fixed number, so that every machine adds in the same order.
inline constexpr int kLanes = 32;
inline constexpr int64_t kNormBlock = 4096;

struct SquaredNormBody {
  static SHARDD_ALWAYS_INLINE void Run(const float* src, int64_t numel, double* result) {
    double total = 0;
    for (int64_t block = 0; block < numel; block += kNormBlock) {
      const int64_t end = numel - block < kNormBlock ? numel : block + kNormBlock;
      double lanes[kLanes] = {};
      int64_t i = block;
      for (; i + kLanes <= end; i += kLanes) {
        for (int j = 0; j < kLanes; ++j) {
          const double x = static_cast<double>(src[i + j]);
          lanes[j] += x * x;
        }
      }
      for (int j = 0; i < end; ++i, ++j) {
        const double x = static_cast<double>(src[i]);
        lanes[j] += x * x;
      }
      for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
      }
      total += lanes[0];
    }
    *result = total;
  }
};

}  // namespace

double SquaredNorm(const float* src, int64_t numel) {
  double result = 0;
  tensor::Select<SquaredNormBody, const float*, int64_t, double*>(tensor::CurrentIsa())(src, numel, &result);
  return result;
}

}  // namespace shardd
