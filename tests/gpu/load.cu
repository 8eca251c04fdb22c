// Kernels that stand for what a trainer computes. Compiled for what the daemon's kernels are.

#include <cstdint>

// Multiplies and adds in registers: nothing of memory is used but the end of `out`, one float per thread.
extern "C" __global__ void shardd_test_compute(float* out, int rounds) {
  float a = static_cast<float>(threadIdx.x), b = 1.0f, c = 2.0f, d = 3.0f;
  for (int i = 0; i < rounds; ++i) {
    a = __fmaf_rn(a, 0.999f, 0.5f);
    b = __fmaf_rn(b, 0.998f, 0.25f);
    c = __fmaf_rn(c, 0.997f, 0.125f);
    d = __fmaf_rn(d, 0.996f, 0.0625f);
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = a + b + c + d;
}

// Writes to `out` again and again, until a minute is over or somebody sets *stop. *running says that it has begun.
extern "C" __global__ void shardd_test_write(volatile uint32_t* out, int numel, volatile uint64_t* running,
                                             const volatile uint64_t* stop) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int stride = static_cast<int>(gridDim.x * blockDim.x);
  for (uint32_t round = 1;; ++round) {
    for (int i = first; i < numel; i += stride) out[i] = round;
    if (first == 0) {
      *running = round;
      __threadfence_system();
    }
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now - begin > 60000000000ull || *stop != 0) return;
  }
}
