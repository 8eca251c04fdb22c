#ifndef SHARDD_SERVER_DEVICE_CUDA_KERNEL_IMAGE_H_
#define SHARDD_SERVER_DEVICE_CUDA_KERNEL_IMAGE_H_

#include <cstddef>

namespace shardd::cuda {

// The fat binary with the kernels of kernels.h, for cuLibraryLoadData, aligned to 16 bytes. nullptr and 0 in a build
// without nvcc: such a daemon has no CUDA device, and says so when it is asked for one.
extern const void* const kKernelImage;
extern const size_t kKernelImageSizeBytes;

}  // namespace shardd::cuda

#endif  // SHARDD_SERVER_DEVICE_CUDA_KERNEL_IMAGE_H_
