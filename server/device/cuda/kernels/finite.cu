#include "server/device/cuda/kernels/finite.cuh"

extern "C" __global__ void __launch_bounds__(shardd::cuda::kBlockThreads)
    shardd_finite(const __grid_constant__ shardd::cuda::FiniteArgs args) {
  shardd::cuda::FiniteThread(args, shardd::cuda::ThisThread());
}
