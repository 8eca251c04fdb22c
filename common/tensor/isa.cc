#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/tensor/isa_internal.h"

namespace shardd::tensor {
namespace {

Isa DetectIsa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) return Isa::kAvx512;
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kBase;
}

std::atomic<Isa>& Current() {
  static std::atomic<Isa> current(BestIsa());
  return current;
}

#if defined(__x86_64__)
SHARDD_TARGET_AVX512 void StreamCopyAvx512(const char* src, char* dst, int64_t size_bytes) {
  for (int64_t i = 0; i < size_bytes; i += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), _mm512_loadu_si512(src + i));
  }
}

void StreamCopyBase(const char* src, char* dst, int64_t size_bytes) {
  for (int64_t i = 0; i < size_bytes; i += 64) {
    for (int64_t j = i; j < i + 64; j += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(dst + j), _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + j)));
    }
  }
}
#endif

}  // namespace

Isa BestIsa() {
  static const Isa best = DetectIsa();
  return best;
}

Isa CurrentIsa() { return Current().load(std::memory_order_relaxed); }

void SetIsaForTest(Isa isa) { Current().store(isa < BestIsa() ? isa : BestIsa(), std::memory_order_relaxed); }

void StreamCopy(const void* src, void* dst, int64_t size_bytes) {
#if defined(__x86_64__)
  if (CurrentIsa() == Isa::kAvx512) {
    StreamCopyAvx512(static_cast<const char*>(src), static_cast<char*>(dst), size_bytes);
  } else {
    StreamCopyBase(static_cast<const char*>(src), static_cast<char*>(dst), size_bytes);
  }
#else
  std::memcpy(dst, src, static_cast<size_t>(size_bytes));
#endif
}

void StreamFence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

void UnsupportedDType(const char* kernel, int dtype) {
  std::fprintf(stderr, "%s: dtype %d is not supported\n", kernel, dtype);
  std::abort();
}

}  // namespace shardd::tensor
