#include "server/device/cuda/kernels/sgd.cuh"

extern "C" __global__ void __launch_bounds__(shardd::cuda::kBlockThreads)
    shardd_sgd(const __grid_constant__ shardd::cuda::SgdArgs args) {
  shardd::cuda::SgdThread(args, shardd::cuda::ThisThread());
}
