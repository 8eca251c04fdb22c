#include "server/device/cuda/kernels/rule.cuh"

extern "C" __global__ void __launch_bounds__(shardd::cuda::kBlockThreads)
    shardd_rule(const __grid_constant__ shardd::cuda::RuleArgs args) {
  shardd::cuda::RuleThread(args, shardd::cuda::ThisThread());
}
