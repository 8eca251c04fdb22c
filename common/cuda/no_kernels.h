#ifndef SHARDD_COMMON_CUDA_NO_KERNELS_H_
#define SHARDD_COMMON_CUDA_NO_KERNELS_H_

namespace shardd {

// Error text of a daemon that was built without kernels and is asked for GPUs. The library that started the daemon
// looks for it in the daemon's log.
inline constexpr char kNoCudaKernels[] = "this build has none, it was made where there was no nvcc";

}  // namespace shardd

#endif  // SHARDD_COMMON_CUDA_NO_KERNELS_H_
