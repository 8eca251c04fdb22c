#include "server/device/cuda/kernels/reduce.cuh"

extern "C" __global__ void __launch_bounds__(shardd::cuda::kBlockThreads)
    shardd_reduce(const __grid_constant__ shardd::cuda::ReduceArgs args) {
  shardd::cuda::ReduceThread(args, shardd::cuda::ThisThread());
}
