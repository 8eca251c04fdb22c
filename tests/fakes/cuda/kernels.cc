#include "tests/fakes/cuda/kernels.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <thread>
#include <vector>

#include "common/tensor/kernels.h"
#include "common/tensor/norm.h"
#include "server/device/cuda/kernels.h"

namespace shardd::fake_cuda {
namespace {

DType TypeOf(cuda::KernelDType number) { return static_cast<DType>(number); }
size_t SizeOf(int64_t numel, DType dtype) { return static_cast<size_t>(numel * DTypeSizeBytes(dtype)); }

bool MayRead(const Launch& launch, const void* p, int64_t numel, DType dtype) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  return address % static_cast<uintptr_t>(DTypeSizeBytes(dtype)) == 0 && launch.Reads(p, SizeOf(numel, dtype));
}
bool MayWrite(const Launch& launch, const void* p, int64_t numel, DType dtype) {
  return MayRead(launch, p, numel, dtype) && launch.Writes(p, SizeOf(numel, dtype));
}
constexpr DType kF32 = v1::DTYPE_FLOAT32;

bool RunCast(const Launch& launch) {
  const auto& a = *static_cast<const cuda::CastArgs*>(launch.args);
  const DType from = TypeOf(a.from), to = TypeOf(a.to);
  if (a.scale != 1 || !MayRead(launch, a.src, a.numel, from) || !MayWrite(launch, a.dst, a.numel, to)) return false;
  Cast(a.src, from, a.dst, to, a.numel);
  return true;
}

// FAKE_CUDA_ADD_US: how long an addition of several sources takes besides.
std::chrono::microseconds AddTime() {
  static const char* const told = std::getenv("FAKE_CUDA_ADD_US");
  return std::chrono::microseconds(told == nullptr ? 0 : std::atoi(told));
}

bool RunReduce(const Launch& launch) {
  const auto& a = *static_cast<const cuda::ReduceArgs*>(launch.args);
  const absl::Span<const void* const> sources(a.sources, static_cast<size_t>(a.source_count));
  for (const void* source : sources) {
    if (!MayRead(launch, source, a.numel, TypeOf(a.source_dtype))) return false;
  }
  if (!MayWrite(launch, a.dst, a.numel, kF32)) return false;
  if (a.source_count > 1) std::this_thread::sleep_for(AddTime());
  ReduceSources(sources, TypeOf(a.source_dtype), TypeOf(a.reduce_dtype), TypeOf(a.keep), a.scale, a.accumulate != 0,
                a.dst, a.numel);
  return true;
}

// The first kernel leaves a partial for each block, the second adds them up. Here the first writes only the scratch
// that it may write, and the second does the sum as the CPU device does it, slice by slice.
bool RunNorm(const Launch& launch) {
  const auto& a = *static_cast<const cuda::NormArgs*>(launch.args);
  const auto scratch_bytes = static_cast<size_t>(cuda::NormScratchBytes(a.numel));
  if (!MayRead(launch, a.src, a.numel, kF32) || !launch.Writes(a.scratch, scratch_bytes)) return false;
  for (int64_t block = 0; block < cuda::NormBlocks(a.numel); ++block) {
    Norm norm(a.order);
    const int64_t first = block * cuda::kNormBlockNumel;
    norm.Add(a.src + first, std::min(cuda::kNormBlockNumel, a.numel - first));
    a.scratch[block] = norm.state();
  }
  return true;
}
bool RunNormFinish(const Launch& launch) {
  const auto& a = *static_cast<const cuda::NormArgs*>(launch.args);
  const auto scratch_bytes = static_cast<size_t>(cuda::NormScratchBytes(a.numel));
  if (!launch.Writes(a.scratch, scratch_bytes) || !launch.Writes(a.result, sizeof(NormState))) return false;
  Norm norm(a.order);
  norm.set_state(*a.result);
  for (int64_t block = 0; block < cuda::NormBlocks(a.numel);) {
    Norm slice(a.order);
    const int64_t end = std::min(block + cuda::kNormSliceBlocks, cuda::NormBlocks(a.numel));
    for (; block < end; ++block) {
      Norm partial(a.order);
      partial.set_state(a.scratch[block]);
      slice.Add(partial);
    }
    norm.Add(slice);
  }
  *a.result = norm.state();
  return true;
}

bool RunAdamW(const Launch& launch) {
  const auto& a = *static_cast<const cuda::AdamWArgs*>(launch.args);
  if (!MayWrite(launch, a.p, a.numel, TypeOf(a.param_dtype)) || !MayRead(launch, a.g, a.numel, kF32) ||
      !MayWrite(launch, a.m, a.numel, kF32) || !MayWrite(launch, a.v, a.numel, kF32) ||
      (a.cast_dst != nullptr && !MayWrite(launch, a.cast_dst, a.numel, TypeOf(a.cast_dtype)))) {
    return false;
  }
  AdamWUpdateWith(a.scalars, a.p, TypeOf(a.param_dtype), a.g, a.m, a.v, a.cast_dst, TypeOf(a.cast_dtype),
                  launch.Reached(a.numel));
  return true;
}

bool RunSgd(const Launch& launch) {
  const auto& a = *static_cast<const cuda::SgdArgs*>(launch.args);
  if (!MayWrite(launch, a.p, a.numel, TypeOf(a.param_dtype)) || !MayRead(launch, a.g, a.numel, kF32) ||
      (a.buf != nullptr && !MayWrite(launch, a.buf, a.numel, kF32)) ||
      (a.cast_dst != nullptr && !MayWrite(launch, a.cast_dst, a.numel, TypeOf(a.cast_dtype)))) {
    return false;
  }
  SgdUpdateWith(a.scalars, a.nesterov != 0, a.first_step != 0, a.p, TypeOf(a.param_dtype), a.g, a.buf, a.cast_dst,
                TypeOf(a.cast_dtype), launch.Reached(a.numel));
  return true;
}

bool RunRule(const Launch& launch) {
  const auto& a = *static_cast<const cuda::RuleArgs*>(launch.args);
  if (!MayWrite(launch, a.p, a.numel, TypeOf(a.param_dtype)) || !MayRead(launch, a.g, a.numel, kF32) ||
      !MayWrite(launch, a.a, a.numel, kF32) || (a.b != nullptr && !MayWrite(launch, a.b, a.numel, kF32)) ||
      (a.cast_dst != nullptr && !MayWrite(launch, a.cast_dst, a.numel, TypeOf(a.cast_dtype)))) {
    return false;
  }
  RuleUpdateWith(static_cast<UpdateRule>(a.rule), a.scalars, a.p, TypeOf(a.param_dtype), a.g, a.a, a.b, a.cast_dst,
                 TypeOf(a.cast_dtype), launch.Reached(a.numel));
  return true;
}

bool RunFinite(const Launch& launch) {
  const auto& a = *static_cast<const cuda::FiniteArgs*>(launch.args);
  const DType dtype = TypeOf(a.dtype);
  if (!MayRead(launch, a.src, a.numel, dtype) || !launch.Writes(a.found, sizeof(*a.found))) return false;
  std::vector<double> values(static_cast<size_t>(a.numel));
  Cast(a.src, dtype, values.data(), v1::DTYPE_FLOAT64, a.numel);
  if (!std::all_of(values.begin(), values.end(), [](double x) { return std::isfinite(x); })) *a.found = 1;
  return true;
}

}  // namespace

void AddReferenceKernels(Machine& machine) {
  machine.AddKernel(cuda::kCastKernel, sizeof(cuda::CastArgs), RunCast);
  machine.AddKernel(cuda::kReduceKernel, sizeof(cuda::ReduceArgs), RunReduce);
  machine.AddKernel(cuda::kNormKernel, sizeof(cuda::NormArgs), RunNorm);
  machine.AddKernel(cuda::kNormFinishKernel, sizeof(cuda::NormArgs), RunNormFinish);
  machine.AddKernel(cuda::kFiniteKernel, sizeof(cuda::FiniteArgs), RunFinite);
  machine.AddKernel(cuda::kAdamWKernel, sizeof(cuda::AdamWArgs), RunAdamW);
  machine.AddKernel(cuda::kSgdKernel, sizeof(cuda::SgdArgs), RunSgd);
  machine.AddKernel(cuda::kRuleKernel, sizeof(cuda::RuleArgs), RunRule);
}

}  // namespace shardd::fake_cuda
