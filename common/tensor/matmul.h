#ifndef SHARDD_COMMON_TENSOR_MATMUL_H_
#define SHARDD_COMMON_TENSOR_MATMUL_H_

#include <cstdint>

namespace shardd {

// A row-major matrix of floats; rows begin `stride` elements apart.
struct MatrixView {
  const float* data = nullptr;
  int64_t stride = 0;
};

// out[i][j] = sum over l of a[i][l] * b[l][j], or of a[i][l] * b[j][l] with `b_transposed`; a is m x k, out m x n. Sums
// are fp32, by one thread, in an order that the three sizes and `b_transposed` alone decide: the same arguments give
// the same bits on every machine. `out`, with rows `out_stride` apart, overlaps neither. Packs its operands into at
// most a few MiB of the heap. REQUIRES: m, n, k > 0. Thread-safe.
void MatMul(MatrixView a, MatrixView b, bool b_transposed, float* out, int64_t out_stride, int64_t m, int64_t n,
            int64_t k);

}  // namespace shardd

#endif  // SHARDD_COMMON_TENSOR_MATMUL_H_
