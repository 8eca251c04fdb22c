// A library to preload (LD_PRELOAD): a wall clock that is set again and again. Whatever looks at it finds it an hour
// before (SHARDD_TEST_CLOCK=back) or behind (=forward) where it was at the look before, so that no wait by it ends when
// it should: not one that computes its end from two looks, nor one that sleeps in the kernel until a moment of it.
// CLOCK_MONOTONIC is as ever.

#include <errno.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kJump = 3600 * kSecond;
constexpr int64_t kInterval = 5'000'000;  // between the looks of a sleeper

std::atomic<int64_t> looks{0};

// Not through glibc's, which are this library's own here.
long RawCall(long number, long a, long b, long c, long d, long e, long f) {
  register long r10 asm("r10") = d;
  register long r8 asm("r8") = e;
  register long r9 asm("r9") = f;
  long result = 0;
  asm volatile("syscall"
               : "=a"(result)
               : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
               : "rcx", "r11", "memory");
  return result;
}

long Call(long number, long a, long b, long c, long d, long e, long f) {
  const long result = RawCall(number, a, b, c, d, e, f);
  if (result < 0 && result >= -4095) {
    errno = static_cast<int>(-result);
    return -1;
  }
  return result;
}

long Address(const void* p) { return reinterpret_cast<long>(p); }

int64_t Direction() {
  static const int64_t direction = [] {
    const char* const how = getenv("SHARDD_TEST_CLOCK");
    if (how == nullptr) return 0;
    return strcmp(how, "back") == 0 ? -1 : strcmp(how, "forward") == 0 ? 1 : 0;
  }();
  return direction;
}

int64_t Look() {
  looks.fetch_add(1, std::memory_order_relaxed);
  timespec now{};
  (void)RawCall(SYS_clock_gettime, CLOCK_REALTIME, Address(&now), 0, 0, 0, 0);
  return now.tv_sec * kSecond + now.tv_nsec + Direction() * kJump * looks.load(std::memory_order_relaxed);
}

timespec ToTimespec(int64_t ns) {
  timespec time{};
  time.tv_sec = ns / kSecond;
  time.tv_nsec = ns % kSecond;
  return time;
}

// FUTEX_WAIT_BITSET until a moment of the wall clock, as the kernel does it where the clock is set meanwhile: a sleeper
// looks at it, too.
long WaitUntil(long word, int operation, long value, const timespec* moment) {
  const int64_t end = moment->tv_sec * kSecond + moment->tv_nsec;
  for (int64_t left = end - Look(); left > 0; left = end - Look()) {
    const timespec look = ToTimespec(std::min(left, kInterval));
    const long result =
        Call(SYS_futex, word, FUTEX_WAIT | (operation & FUTEX_PRIVATE_FLAG), value, Address(&look), 0, 0);
    if (result == 0 || errno != ETIMEDOUT) {
      return result;
    }
  }
  errno = ETIMEDOUT;
  return -1;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int clock_gettime(clockid_t clock, timespec* time) noexcept {
  if (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE) {
    return static_cast<int>(Call(SYS_clock_gettime, clock, Address(time), 0, 0, 0, 0));
  }
  *time = ToTimespec(Look());
  return 0;
}

extern "C" __attribute__((visibility("default"))) long syscall(long number, ...) noexcept {
  va_list arguments;
  va_start(arguments, number);
  const long a = va_arg(arguments, long), b = va_arg(arguments, long), c = va_arg(arguments, long),
             d = va_arg(arguments, long), e = va_arg(arguments, long), f = va_arg(arguments, long);
  va_end(arguments);
  const int operation = static_cast<int>(b);
  if (number == SYS_futex && d != 0 && (operation & FUTEX_CLOCK_REALTIME) != 0 &&
      (operation & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET) {
    return WaitUntil(a, operation, c, reinterpret_cast<const timespec*>(d));
  }
  return Call(number, a, b, c, d, e, f);
}
