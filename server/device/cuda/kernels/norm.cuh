#ifndef SHARDD_SERVER_DEVICE_CUDA_KERNELS_NORM_CUH_
#define SHARDD_SERVER_DEVICE_CUDA_KERNELS_NORM_CUH_

// A warp plays the lanes of a block in common/tensor/norm.cc: lane j adds the elements j, j + 32, ... and the lanes are
// then added in halves. So the partial of a block has the same bits as on a CPU.

#include <cmath>
#include <cstdint>

#include "server/device/cuda/kernels/element.cuh"

namespace shardd::cuda {

inline constexpr int kLanes = 32;

// |x|^kPower
template <int kPower>
SHARDD_ALWAYS_INLINE double Power(float value) {
  const double x = static_cast<double>(value);
  if constexpr (kPower == 1) return fabs(x);
  if constexpr (kPower == 2) return x * x;
  if constexpr (kPower == 3) return x * x * fabs(x);
  return (x * x) * (x * x);
}

// A lane's sum over the block src[0, count).
template <int kPower>
SHARDD_ALWAYS_INLINE double LaneSum(const float* src, int count, int lane) {
  double sum = 0;
  SHARDD_UNROLL_8
  for (int i = lane; i < count; i += kLanes) sum += Power<kPower>(src[i]);
  return sum;
}

// The larger of two; NaN if either is.
SHARDD_ALWAYS_INLINE float Larger(float a, float b) { return a > b || IsNan(a) ? a : b; }

SHARDD_ALWAYS_INLINE float LaneLargest(const float* src, int count, int lane) {
  float largest = 0;
  SHARDD_UNROLL_8
  for (int i = lane; i < count; i += kLanes) largest = Larger(largest, fabsf(src[i]));
  return largest;
}

// Any other order: sums powers of |x| / largest, where `largest` is above 0 and finite.
SHARDD_ALWAYS_INLINE double LaneScaledSum(const float* src, int count, int lane, double largest, double order) {
  double sum = 0;
  for (int i = lane; i < count; i += kLanes) sum += pow(fabs(static_cast<double>(src[i])) / largest, order);
  return sum;
}

SHARDD_ALWAYS_INLINE bool IsDirect(double order) { return order == 1 || order == 2 || order == 3 || order == 4; }
SHARDD_ALWAYS_INLINE bool IsInfinite(double x) { return x == __builtin_huge_val() || x == -__builtin_huge_val(); }
SHARDD_ALWAYS_INLINE bool IsFiniteDouble(double x) { return !IsNan(x) && !IsInfinite(x); }

// Norm::AddScaled, for the orders that are not summed directly.
SHARDD_ALWAYS_INLINE void AddScaled(double order, NormState part, NormState* to) {
  if (part.scale == 0 || IsNan(to->scale)) return;
  if (!IsFiniteDouble(part.scale) || !IsFiniteDouble(to->scale) || IsInfinite(order)) {
    if (part.scale > to->scale || IsNan(part.scale)) to->scale = part.scale;
    to->sum = 1;
    return;
  }
  if (part.scale > to->scale) {
    to->sum = to->scale == 0 ? part.sum : to->sum * pow(to->scale / part.scale, order) + part.sum;
    to->scale = part.scale;
  } else {
    to->sum += part.sum * pow(part.scale / to->scale, order);
  }
}

// Adds parts[0, count) one after another. One thread does this, so the number of loads in flight decides its time.
SHARDD_ALWAYS_INLINE void AddParts(double order, const NormState* parts, int64_t count, NormState* to) {
  if (!IsDirect(order)) {
    for (int64_t i = 0; i < count; ++i) AddScaled(order, parts[i], to);
    return;
  }
  double sum = to->sum;
  SHARDD_UNROLL_16
  for (int64_t i = 0; i < count; ++i) sum += parts[i].sum;
  to->sum = sum;
  if (count > 0) to->scale = 1;
}

// Adds partials [first, first + kNormSliceBlocks) of `blocks` into one.
SHARDD_ALWAYS_INLINE NormState SliceOf(const NormArgs& args, int64_t first, int64_t blocks) {
  const int64_t end = first + kNormSliceBlocks < blocks ? first + kNormSliceBlocks : blocks;
  NormState slice = {0, 0};
  AddParts(args.order, args.scratch + first, end - first, &slice);
  return slice;
}

}  // namespace shardd::cuda

#endif  // SHARDD_SERVER_DEVICE_CUDA_KERNELS_NORM_CUH_
