#include "server/device/cuda/kernels/adamw.cuh"

extern "C" __global__ void __launch_bounds__(shardd::cuda::kBlockThreads)
    shardd_adamw(const __grid_constant__ shardd::cuda::AdamWArgs args) {
  shardd::cuda::AdamWThread(args, shardd::cuda::ThisThread());
}
