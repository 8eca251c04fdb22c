#ifndef SHARDD_COMMON_TENSOR_FLOAT8_BLOCKS_H_
#define SHARDD_COMMON_TENSOR_FLOAT8_BLOCKS_H_

// Float8 with a scale by block: how parameters cross nodes with MixedPrecision.float8_gathers, and what ranks then
// read.
//
// Layout: blocks of kFloat8BlockNumel elements, the last one shorter. A block is a byte for its scale, then a byte for
// each element: a float8 e4m3fn (sign, 4 bits of exponent, 3 of mantissa; at most 448, no infinity). The scale is the
// power of two 2^(byte - 127), as that of the OCP microscaling formats: the smallest that leaves every finite element
// of the block within 448, and at least 2^-126. A float keeps its relative precision whatever its scale, so a finer
// scale would gain half a bit for the smallest elements alone; and with powers of two both the division and the
// product are exact, so a decoded value has the same bits in every dtype and rounding a second time changes nothing.
//
// Numerics: an element is first rounded to the dtype in which ranks read it, then to float8, to nearest and ties to
// even. The error of the second rounding is at most 2^-4 of the element or 2^-17 of the block's largest, whichever is
// more (or 2^-136, far below what training can tell). Zeros keep their sign. NaN and infinity become NaN and do not
// affect the scale, so an overflow is still seen and spoils no other element. A finite element never becomes infinite:
// what rounds up beyond the largest number of its dtype is that number.

#include <cstdint>

#include "common/tensor/dtype.h"

namespace shardd {

inline constexpr int64_t kFloat8BlockNumel = 128;
inline constexpr int64_t kFloat8BlockBytes = kFloat8BlockNumel + 1;  // of a full block

// Bytes of `numel` elements in blocks, scales included.
constexpr int64_t Float8BlocksBytes(int64_t numel) {
  return numel + (numel + kFloat8BlockNumel - 1) / kFloat8BlockNumel;
}

// True for dtypes in which ranks may read decoded values: fp32, bf16, fp16.
bool HasFloat8Blocks(DType dtype);

// Writes `numel` elements, of which the first begins a block, to Float8BlocksBytes(numel) bytes at `blocks`. `from`: a
// floating dtype. `to`: the dtype in which ranks read them. REQUIRES: HasFloat8Blocks(to).
void EncodeFloat8Blocks(const void* src, DType from, DType to, void* blocks, int64_t numel);

// Reads them back. Any bytes are valid blocks. REQUIRES: HasFloat8Blocks(to).
void DecodeFloat8Blocks(const void* blocks, void* dst, DType to, int64_t numel);

// Both: what a rank reads of `src`. REQUIRES: as the two.
void RoundToFloat8Blocks(const void* src, DType from, void* dst, DType to, int64_t numel);

namespace tensor {

// One element without a scale. Finite values beyond 448 become 448; infinity and NaN become NaN, with their sign.
uint8_t FloatToFloat8(float x);
float Float8ToFloat(uint8_t code);

}  // namespace tensor

}  // namespace shardd

#endif  // SHARDD_COMMON_TENSOR_FLOAT8_BLOCKS_H_
