#ifndef SHARDD_COMMON_CUDA_REDUCE_H_
#define SHARDD_COMMON_CUDA_REDUCE_H_

// The one kernel that daemon and trainers both launch, and the geometry of every launch. Part of
// server/device/cuda/kernels.h, whose contract applies. Host and device code include it, without a CUDA header.

#include <cstdint>

namespace shardd::cuda {

// Dtype of elements. The numbers are those of v1::DType.
using KernelDType = int32_t;
inline constexpr KernelDType kNoDType = 0;
inline constexpr KernelDType kFloat32 = 1;
inline constexpr KernelDType kBFloat16 = 2;
inline constexpr KernelDType kFloat16 = 3;
inline constexpr KernelDType kFloat64 = 4;

// ReduceOp: sum = (reduce(sources[0][i]) + reduce(sources[1][i])) + ..., in fp32 and in this order;
// r = keep(reduce(scale * sum)); dst[i] = accumulate ? keep(dst[i] + r) : r.
inline constexpr char kReduceKernel[] = "shardd_reduce";
inline constexpr int kMaxReduceSources = 128;  // per launch; CUDA limits parameters to 4 KiB
struct ReduceArgs {
  const void* sources[kMaxReduceSources];  // in rank order
  int32_t source_count;                    // 1 to kMaxReduceSources
  KernelDType source_dtype;                // fp32, bf16 or fp16
  KernelDType reduce_dtype;                // likewise, or none: the dtype of the sources
  KernelDType keep;                        // likewise, or none: fp32
  float scale;
  int32_t accumulate;  // 0 or 1
  float* dst;
  int64_t numel;
};

// Shape of a launch.
struct Geometry {
  uint32_t grid;
  uint32_t block;
};
inline constexpr uint32_t kBlockThreads = 256;
// Many more blocks than run at once, so that the last of them leave little of the device idle. Threads stride over the
// rest.
inline constexpr int64_t kBlocksPerMultiprocessor = 128;

// One thread for every `per_thread` elements, but no more than fill the device.
constexpr Geometry GridFor(int64_t numel, int64_t per_thread, int multiprocessors) {
  const int64_t threads = (numel + per_thread - 1) / per_thread;
  const int64_t blocks = (threads + kBlockThreads - 1) / kBlockThreads;
  const int64_t most = kBlocksPerMultiprocessor * (multiprocessors > 0 ? multiprocessors : 1);
  return {static_cast<uint32_t>(blocks < most ? blocks : most), kBlockThreads};
}
constexpr Geometry GeometryOf(const ReduceArgs& args, int multiprocessors) {
  return GridFor(args.numel, 8, multiprocessors);
}

}  // namespace shardd::cuda

#endif  // SHARDD_COMMON_CUDA_REDUCE_H_
