#ifndef SHARDD_COMMON_CUDA_NO_KERNELS_H_
#define SHARDD_COMMON_CUDA_NO_KERNELS_H_

namespace shardd {

// What a daemon that was built without kernels says where it is asked for GPUs, and the library that has started it
// looks for in its log.
inline constexpr char kNoCudaKernels[] = "this build has none, it was made where there was no nvcc";

}  // namespace shardd

#endif  // SHARDD_COMMON_CUDA_NO_KERNELS_H_
