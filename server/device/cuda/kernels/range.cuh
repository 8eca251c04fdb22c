#ifndef SHARDD_SERVER_DEVICE_CUDA_KERNELS_RANGE_CUH_
#define SHARDD_SERVER_DEVICE_CUDA_KERNELS_RANGE_CUH_

// Splits a range of elements among the threads of a launch, whatever their number: a head until the destination is
// aligned, packs of kPack elements, a tail.

#include <cstdint>

#include "server/device/cuda/kernels/pack.cuh"

namespace shardd::cuda {

// One of `count` threads, over all blocks.
struct Thread {
  int64_t index;
  int64_t count;
};

#if defined(__CUDACC__)
__device__ __forceinline__ Thread ThisThread() {
  return {static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, static_cast<int64_t>(gridDim.x) * blockDim.x};
}
#endif

template <int kPack>
struct Range {
  int64_t head;   // elements before the first pack, fewer than kPack
  int64_t packs;  // [head, head + packs * kPack)
  int64_t numel;

  // Packs begin where `aligned` has their alignment.
  template <typename T>
  static SHARDD_ALWAYS_INLINE Range Of(const T* aligned, int64_t numel) {
    constexpr int kWidth = Pack<T, kPack>::kWidth;
    int64_t head = (kWidth - static_cast<int>(Misaligned(aligned, kWidth))) % kWidth / static_cast<int>(sizeof(T));
    if (head > numel) head = numel;
    return {head, (numel - head) / kPack, numel};
  }

  // Calls single(i) for every element outside of packs and pack(k) for every pack, each by one thread.
  template <typename Single, typename PackFn>
  SHARDD_ALWAYS_INLINE void ForEach(Thread thread, Single single, PackFn pack) const {
    const int64_t singles = numel - packs * kPack;
    for (int64_t i = thread.index; i < singles; i += thread.count) single(i < head ? i : i + packs * kPack);
    for (int64_t k = thread.index; k < packs; k += thread.count) pack(k);
  }
};

}  // namespace shardd::cuda

#endif  // SHARDD_SERVER_DEVICE_CUDA_KERNELS_RANGE_CUH_
