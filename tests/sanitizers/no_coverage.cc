// What code that counts its coverage for libFuzzer calls (SHARDD_FUZZ_COVERAGE), for programs and libraries that are no
// fuzzers: nothing. So one build of the libraries serves both.
#include <cstddef>
#include <cstdint>

#define SHARDD_COVERAGE_HOOK extern "C" __attribute__((visibility("hidden"), no_sanitize("coverage")))

extern "C" __attribute__((visibility("hidden"))) thread_local uintptr_t __sancov_lowest_stack = 0;
SHARDD_COVERAGE_HOOK void __sanitizer_cov_8bit_counters_init(uint8_t*, uint8_t*) {}
SHARDD_COVERAGE_HOOK void __sanitizer_cov_pcs_init(const uintptr_t*, const uintptr_t*) {}
SHARDD_COVERAGE_HOOK void __sanitizer_cov_trace_pc_indir(uintptr_t) {}
SHARDD_COVERAGE_HOOK void __sanitizer_cov_trace_cmp1(uint8_t, uint8_t) {}
SHARDD_COVERAGE_HOOK void __sanitizer_cov_trace_cmp2(uint16_t, uint16_t) {}
SHARDD_COVERAGE_HOOK void __sanitizer_cov_trace_cmp4(uint32_t, uint32_t) {}
SHARDD_COVERAGE_HOOK void __sanitizer_cov_trace_cmp8(uint64_t, uint64_t) {}
SHARDD_COVERAGE_HOOK void __sanitizer_cov_trace_const_cmp1(uint8_t, uint8_t) {}
SHARDD_COVERAGE_HOOK void __sanitizer_cov_trace_const_cmp2(uint16_t, uint16_t) {}
SHARDD_COVERAGE_HOOK void __sanitizer_cov_trace_const_cmp4(uint32_t, uint32_t) {}
SHARDD_COVERAGE_HOOK void __sanitizer_cov_trace_const_cmp8(uint64_t, uint64_t) {}
SHARDD_COVERAGE_HOOK void __sanitizer_cov_trace_div4(uint32_t) {}
SHARDD_COVERAGE_HOOK void __sanitizer_cov_trace_div8(uint64_t) {}
SHARDD_COVERAGE_HOOK void __sanitizer_cov_trace_gep(uintptr_t) {}
SHARDD_COVERAGE_HOOK void __sanitizer_cov_trace_switch(uint64_t, uint64_t*) {}
