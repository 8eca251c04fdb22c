// What the sanitizers are told, compiled into every executable of the asan and tsan presets: so a test, the daemon that
// it starts and a binary run by hand behave alike, with no environment to set.
#if defined(__has_feature)  // clang, and not GCC, which has the macros
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SHARDD_SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(SHARDD_SANITIZER)

#include <unistd.h>

#define SHARDD_SANITIZER_HOOK extern "C" __attribute__((visibility("default"), used, no_sanitize("address", "thread")))

SHARDD_SANITIZER_HOOK const char* __asan_default_options() {
  // Static copies of the same code live in libshardd.so and in the test that loads it, on purpose: no ODR check.
  return "detect_stack_use_after_return=1:strict_string_checks=1:detect_odr_violation=0";
}

// A forked child of a test has the parent's memory and none of its threads: what those hold looks lost.
static const pid_t started = getpid();
SHARDD_SANITIZER_HOOK int __lsan_is_turned_off() { return getpid() != started ? 1 : 0; }

// gRPC's c-ares copies names of the system when it resolves the first address, and the process ends with them.
SHARDD_SANITIZER_HOOK const char* __lsan_default_suppressions() { return "leak:ares_strdup\n"; }
SHARDD_SANITIZER_HOOK const char* __lsan_default_options() { return "print_suppressions=0"; }

SHARDD_SANITIZER_HOOK const char* __ubsan_default_options() { return "print_stacktrace=1:halt_on_error=1"; }

SHARDD_SANITIZER_HOOK const char* __tsan_default_options() {
  // Thread leaks: a trainer may end while attached, and gRPC's threads end with the process.
  return "ignore_noninstrumented_modules=1:second_deadlock_stack=1:die_after_fork=0:history_size=4:report_thread_leaks="
         "0";
}

// gRPC and protobuf come from archives without instrumentation: their atomics are invisible, so what they hand from
// thread to thread looks unsynchronised. absl's mutexes are compiled with instrumentation
// (deploy/cmake/dependencies.cmake).
SHARDD_SANITIZER_HOOK const char* __tsan_default_suppressions() {
  return "race:absl::debian3::synchronization_internal::\n"
         "race:^grpc::\n"
         "race:^grpc_\n"
         "race:grpc_core::\n"
         "race:grpc_event_engine::\n"
         "race:google::protobuf\n"
         "race:^upb_\n"
         "mutex:grpc_core::\n"
         "deadlock:grpc_core::\n";
}

#endif
