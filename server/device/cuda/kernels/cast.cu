#include "server/device/cuda/kernels/cast.cuh"

extern "C" __global__ void __launch_bounds__(shardd::cuda::kBlockThreads)
    shardd_cast(const __grid_constant__ shardd::cuda::CastArgs args) {
  shardd::cuda::CastThread(args, shardd::cuda::ThisThread());
}
