// The one file that includes Eigen: everything else sees floats.

#include "common/tensor/matmul.h"

// No threads of its own, and nothing under another licence than MPL 2.0.
#define EIGEN_DONT_PARALLELIZE
#define EIGEN_MPL2_ONLY
#include <Eigen/Core>

namespace shardd {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using In = Eigen::Map<const Matrix, Eigen::Unaligned, Eigen::OuterStride<>>;
using Out = Eigen::Map<Matrix, Eigen::Unaligned, Eigen::OuterStride<>>;

// Eigen cuts sums by the sizes of the caches that it finds. These are everybody's, so that all machines cut alike.
bool FixBlocks() {
  Eigen::setCpuCacheSizes(32 << 10, 256 << 10, 2 << 20);
  return true;
}

}  // namespace

void MatMul(MatrixView a, MatrixView b, bool b_transposed, float* out, int64_t out_stride, int64_t m, int64_t n,
            int64_t k) {
  [[maybe_unused]] static const bool fixed = FixBlocks();
  const In left(a.data, m, k, Eigen::OuterStride<>(a.stride));
  Out result(out, m, n, Eigen::OuterStride<>(out_stride));
  if (b_transposed) {
    result.noalias() = left * In(b.data, n, k, Eigen::OuterStride<>(b.stride)).transpose();
  } else {
    result.noalias() = left * In(b.data, k, n, Eigen::OuterStride<>(b.stride));
  }
}

}  // namespace shardd
