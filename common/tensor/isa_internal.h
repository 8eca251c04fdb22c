#ifndef SHARDD_COMMON_TENSOR_ISA_INTERNAL_H_
#define SHARDD_COMMON_TENSOR_ISA_INTERNAL_H_

// One kernel body, compiled for three instruction sets and chosen once per process. Plain function pointers instead of
// target_clones: no ifunc, which the start-up of some sanitizers does not survive; the same code with both compilers;
// and tests can compare the levels.
//
// After its own includes this header makes GCC optimise loops in every build type (without errno of sqrt and floating
// point traps, either of which stops vectorising), and leave loops that copy as they are: vectors of the level, where a
// memcpy of a known size becomes `rep movs` (UpdateLog::Save took more time than the update). So include nothing large
// after it.

#include <cstdint>
#include <utility>

#include "common/tensor/float_bits.h"
#include "common/tensor/isa.h"
#include "common/tensor/kernels.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-math-errno", "no-trapping-math", "fp-contract=off", "no-tree-loop-distribute-patterns")
#define SHARDD_NO_ALIAS _Pragma("GCC ivdep")
#else
#define SHARDD_NO_ALIAS _Pragma("clang loop vectorize(assume_safety)")
#endif

#if defined(__x86_64__)
#define SHARDD_TARGET_AVX2 __attribute__((target("arch=x86-64-v3")))
#define SHARDD_TARGET_AVX512 __attribute__((target("arch=x86-64-v4")))
#else
#define SHARDD_TARGET_AVX2
#define SHARDD_TARGET_AVX512
#endif

namespace shardd::tensor {

// Body::Run must be SHARDD_ALWAYS_INLINE and static.
template <typename Body, typename... Args>
void RunBase(Args... args) {
  Body::Run(args...);
}
template <typename Body, typename... Args>
SHARDD_TARGET_AVX2 void RunAvx2(Args... args) {
  Body::Run(args...);
}
template <typename Body, typename... Args>
SHARDD_TARGET_AVX512 void RunAvx512(Args... args) {
  Body::Run(args...);
}

// The version of Body for `isa`; Args are the parameter types of Run.
template <typename Body, typename... Args>
auto Select(Isa isa) -> void (*)(Args...) {
  if (isa == Isa::kAvx512) return &RunAvx512<Body, Args...>;
  if (isa == Isa::kAvx2) return &RunAvx2<Body, Args...>;
  return &RunBase<Body, Args...>;
}

// Elements per call of a body whose result goes through a block in L1.
inline constexpr int64_t kBlockNumel = 1024;
// Destinations of at least this size bypass the caches. With everything hot in the caches the crossover is at 4 to 8
// MiB; in a step it is not hot, and reading the destination just to overwrite it is a third of a copy's traffic.
inline constexpr int64_t kStreamBytes = int64_t{2} << 20;

// Non-temporal copy. REQUIRES: dst aligned to 64 bytes; size_bytes a multiple of 64.
void StreamCopy(const void* src, void* dst, int64_t size_bytes);
// Orders streamed stores before later ones (the release store that publishes completion does not).
void StreamFence();

// Produces numel elements of `element_bytes` at dst. fill(first, count, out) writes elements [first, first + count) to
// `out`: their place in dst or, with `stream`, a block that is then streamed there.
template <typename Fill>
void ForBlocks(void* dst, int64_t numel, int64_t element_bytes, bool stream, Fill&& fill) {
  char* base = static_cast<char*>(dst);
  if (!stream) {
    fill(int64_t{0}, numel, dst);
    return;
  }
  alignas(64) char block[kBlockNumel * 8];
  const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(base) & 63);
  int64_t first = misaligned == 0 ? 0 : (64 - misaligned) / element_bytes;
  if (first > numel) first = numel;
  if (first > 0) fill(int64_t{0}, first, dst);
  for (; numel - first >= kBlockNumel; first += kBlockNumel) {
    fill(first, kBlockNumel, static_cast<void*>(block));
    StreamCopy(block, base + first * element_bytes, kBlockNumel * element_bytes);
  }
  if (first < numel) fill(first, numel - first, static_cast<void*>(base + first * element_bytes));
  StreamFence();
}

// Reports a broken contract of a kernel on stderr and aborts.
[[noreturn]] void UnsupportedDType(const char* kernel, int dtype);

}  // namespace shardd::tensor

#endif  // SHARDD_COMMON_TENSOR_ISA_INTERNAL_H_
