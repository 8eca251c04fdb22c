#ifndef SHARDD_SERVER_DEVICE_CUDA_KERNELS_H_
#define SHARDD_SERVER_DEVICE_CUDA_KERNELS_H_

// The kernels of the fat binary: their names, the one struct that each takes by value as its only parameter, and the
// number of threads to start. Host and device code include this; it needs no CUDA header.
//
//   CastArgs args = {...};
//   void* params[] = {&args};
//   const Geometry at = GeometryOf(args, multiprocessors);
//   cuLaunchKernel(kernel, at.grid, 1, 1, at.block, 1, 1, 0, stream, params, nullptr);
//
// They compute the same as the CPU kernels of these operations (common/tensor/kernels.h, norm.h), in the same order of
// operations, in fp32 without fused multiply-add, denormals kept:
// - cast, finite: the same bits, those of NaN included.
// - reduce, adamw, sgd, norms of the orders 1, 2, 3, 4 and infinity: the same bits, except that a NaN may have another
//   payload and sign (it stays a NaN).
// - norms of other orders: the same if pow is (CUDA's is within 2 ulp); equal from run to run.
// No result depends on the grid, so a launch may use any grid. None uses atomics: two runs give the same bits.
//
// For all: numel > 0 (otherwise do not launch). Pointers are device-accessible and aligned to their element: reads and
// writes are 16 bytes wide if the addresses allow it, and nothing outside of a range is written. Written ranges must
// not overlap others of the same launch. No shared memory, no constants, no globals.

#include <cstdint>

#include "common/cuda/reduce.h"
#include "common/tensor/norm.h"
#include "common/tensor/update_scalars.h"

namespace shardd::cuda {

// CastOp: dst[i] = cast(src[i]), any pair of the four. Equal dtypes with scale 1 copy bits.
// With a scale other than 1: dst[i] = cast(src[i] * scale), the product in fp32 (fp64 from fp64).
inline constexpr char kCastKernel[] = "shardd_cast";
struct CastArgs {
  const void* src;
  void* dst;
  int64_t numel;
  KernelDType from;
  KernelDType to;
  float scale = 1;
};

// ReduceOp: kReduceKernel and ReduceArgs of common/cuda/reduce.h, which trainers also launch.

// NormOp: two kernels in this order on one stream with the same arguments. The first writes one partial for each block
// of 4096 elements to `scratch`, the second adds them to *result, in a fixed order. Several NormOps with one result,
// one after the other in a stream, equal as many Norm::Add. Norm::state() and Norm::set_state() convert between *result
// and a Norm.
inline constexpr char kNormKernel[] = "shardd_norm";
inline constexpr char kNormFinishKernel[] = "shardd_norm_finish";
inline constexpr int64_t kNormBlockNumel = 4096;
inline constexpr int64_t kNormSliceBlocks = 256;  // partials summed before they are added to the result: a slice of a
                                                  // CPU device (CpuOpSlice)
struct NormArgs {
  const float* src;
  int64_t numel;
  double order;        // Norm::IsOrder
  NormState* scratch;  // NormScratchBytes(numel), aligned to 16; its content does not matter before or after
  NormState* result;   // read and written by the second kernel
};
constexpr int64_t NormBlocks(int64_t numel) { return (numel + kNormBlockNumel - 1) / kNormBlockNumel; }
constexpr int64_t NormSlices(int64_t numel) { return (NormBlocks(numel) + kNormSliceBlocks - 1) / kNormSliceBlocks; }
constexpr int64_t NormScratchBytes(int64_t numel) {
  return (NormBlocks(numel) + NormSlices(numel)) * static_cast<int64_t>(sizeof(NormState));
}

// Sets *found = 1 if an element is infinite or NaN, otherwise leaves it alone.
inline constexpr char kFiniteKernel[] = "shardd_finite";
struct FiniteArgs {
  const void* src;
  int64_t numel;
  KernelDType dtype;
  int32_t* found;
};

// AdamWOp. scalars: MakeAdamWScalars(op.params); its grad_scale is the clip factor and the inverse loss scale in one.
inline constexpr char kAdamWKernel[] = "shardd_adamw";
struct AdamWArgs {
  AdamWScalars scalars;
  KernelDType param_dtype;  // fp32, bf16 or fp16
  void* p;
  const float* g;
  float* m;
  float* v;
  void* cast_dst;  // nullptr, or receives the updated p (as stored) in cast_dtype
  KernelDType cast_dtype;
  int64_t numel;
};

// SgdOp. scalars: MakeSgdScalars(op.params).
inline constexpr char kSgdKernel[] = "shardd_sgd";
struct SgdArgs {
  SgdScalars scalars;
  int32_t nesterov;         // 0 or 1
  int32_t first_step;       // 0 or 1: buf has no value yet
  KernelDType param_dtype;  // fp32, bf16 or fp16
  void* p;
  const float* g;
  float* buf;      // nullptr iff momentum is 0
  void* cast_dst;  // as in AdamWArgs
  KernelDType cast_dtype;
  int64_t numel;
};

// RuleOp. scalars: MakeRuleScalars(op.params).
inline constexpr char kRuleKernel[] = "shardd_rule";
// UpdateRule (common/tensor/kernels.h), which device code does not include; engine_ops.cc compares them.
enum RuleNumber : int32_t {
  kAdagradRule = 0,
  kRmspropRule = 1,
  kRmspropMomentumRule = 2,
  kRmspropCenteredRule = 3,
  kLionRule = 4,
};
struct RuleArgs {
  RuleScalars scalars;
  RuleNumber rule;
  KernelDType param_dtype;  // fp32, bf16 or fp16
  void* p;
  const float* g;
  float* a;
  float* b;        // nullptr iff the rule has one state
  void* cast_dst;  // as in AdamWArgs
  KernelDType cast_dtype;
  int64_t numel;
};

// Geometry of each launch (common/cuda/reduce.h).
constexpr Geometry GeometryOf(const CastArgs& args, int multiprocessors) {
  return GridFor(args.numel, 8, multiprocessors);
}
constexpr Geometry GeometryOf(const FiniteArgs& args, int multiprocessors) {
  return GridFor(args.numel, 8, multiprocessors);
}
constexpr Geometry GeometryOf(const AdamWArgs& args, int multiprocessors) {
  return GridFor(args.numel, 4, multiprocessors);
}
constexpr Geometry GeometryOf(const SgdArgs& args, int multiprocessors) {
  return GridFor(args.numel, 4, multiprocessors);
}
constexpr Geometry GeometryOf(const RuleArgs& args, int multiprocessors) {
  return GridFor(args.numel, 4, multiprocessors);
}
// kNormKernel: a warp per block of elements.
constexpr Geometry GeometryOf(const NormArgs& args, int multiprocessors) {
  return GridFor(NormBlocks(args.numel) * 32, 1, multiprocessors);
}
// kNormFinishKernel: one block, whatever the length.
constexpr Geometry NormFinishGeometry() { return {1, kBlockThreads}; }

}  // namespace shardd::cuda

#endif  // SHARDD_SERVER_DEVICE_CUDA_KERNELS_H_
