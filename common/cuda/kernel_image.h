#ifndef SHARDD_COMMON_CUDA_KERNEL_IMAGE_H_
#define SHARDD_COMMON_CUDA_KERNEL_IMAGE_H_

#include <cstddef>

namespace shardd::cuda {

// The fat binary with the kernels of server/device/cuda/kernels.h, for cuLibraryLoadData, aligned to 16 bytes. nullptr
// and 0 in a build without nvcc: that daemon has no CUDA device and that library reduces no gradients, and both say so
// on request.
extern const void* const kKernelImage;
extern const size_t kKernelImageSizeBytes;

}  // namespace shardd::cuda

#endif  // SHARDD_COMMON_CUDA_KERNEL_IMAGE_H_
