#ifndef SHARDD_SERVER_DEVICE_CUDA_ENGINE_INTERNAL_H_
#define SHARDD_SERVER_DEVICE_CUDA_ENGINE_INTERNAL_H_

#include <cstdint>

#include "server/device/cuda/kernels.h"

namespace shardd {

// One granule of a slab for each stream.
inline constexpr int64_t kCudaScratchBytes = int64_t{2} << 20;

// A norm of more elements than the scratch has partials for is computed in pieces of this size: whole slices, so that
// the result is that of a single piece.
inline constexpr int64_t kCudaNormPieceNumel = kCudaScratchBytes / static_cast<int64_t>(sizeof(NormState)) /
                                               (cuda::kNormSliceBlocks + 1) * cuda::kNormSliceBlocks *
                                               cuda::kNormBlockNumel;
static_assert(cuda::NormScratchBytes(kCudaNormPieceNumel) <= kCudaScratchBytes);

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_CUDA_ENGINE_INTERNAL_H_
