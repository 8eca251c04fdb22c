#ifndef SHARDD_COMMON_CUDA_NO_KERNELS_H_
#define SHARDD_COMMON_CUDA_NO_KERNELS_H_

namespace shardd {

// Error text of a daemon that was built without kernels and is asked for GPUs. The library that started the daemon
// looks for it in the daemon's log.
inline constexpr char kNoCudaKernels[] = "this build has none, it was made where there was no nvcc";

// Error text of a program that was built without NVIDIA's headers (deploy/cmake/nvidia.cmake) and is asked for GPUs;
// the library looks for it, too.
inline constexpr char kNoGpuCode[] = "this build has no code for GPUs, it was made without NVIDIA's headers";

}  // namespace shardd

#endif  // SHARDD_COMMON_CUDA_NO_KERNELS_H_
