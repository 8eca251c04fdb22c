#include "common/shm/timeline.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>

#include "common/shm/timeline_internal.h"

namespace shardd {
namespace {

// The futex word is the half that changes with every sequence: the low one, at the address of the whole word.
static_assert(std::endian::native == std::endian::little);
static_assert(sizeof(TimelineWord) == sizeof(uint64_t) && alignof(TimelineWord) == alignof(uint64_t));

// A sleeper looks again after this long in any case. That bounds the two ways to lose a wake: a hostile process clears
// our `waiting`, or a new epoch whose sequence has the same low half is stored just before the wait.
constexpr absl::Duration kSlice = absl::Milliseconds(100);
constexpr int64_t kForever = INT64_MAX;

int64_t MonotonicNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// No FUTEX_PRIVATE_FLAG: sleeper and waker are different processes.
long Futex(const TimelineWord& word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

int64_t MonotonicDeadlineNs(absl::Duration limit, int64_t now_ns) {
  const int64_t left_ns = absl::ToInt64Nanoseconds(limit);
  return left_ns > kForever - now_ns ? kForever : now_ns + std::max<int64_t>(left_ns, 0);
}

}  // namespace

void TimelineStore(TimelineWord& word, uint64_t value, const std::atomic<uint32_t>* waiting) {
  // The writer stores, then reads `waiting`; the waiter sets `waiting`, then reads. In any total order of these, one
  // side sees the other.
  word.store(value, std::memory_order_seq_cst);
  if (waiting != nullptr && waiting->load(std::memory_order_seq_cst) != 0) {
    Futex(word, FUTEX_WAKE, INT_MAX, nullptr);
  }
}

WaitResult TimelineWait(const TimelineWord& word, uint64_t target, std::atomic<uint32_t>& waiting, absl::Duration limit,
                        absl::Duration spin) {
  if (word.load(std::memory_order_acquire) >= target) {
    return WaitResult::kReached;
  }
  return shm_internal::TimelineWaitSliced(word, target, waiting, limit, spin, kSlice);
}

WaitResult shm_internal::TimelineWaitSliced(const TimelineWord& word, uint64_t target, std::atomic<uint32_t>& waiting,
                                            absl::Duration limit, absl::Duration spin, absl::Duration slice) {
  int64_t now_ns = MonotonicNs();
  const int64_t deadline_ns = MonotonicDeadlineNs(limit, now_ns);
  const int64_t spin_ns = std::clamp<int64_t>(absl::ToInt64Nanoseconds(spin), 0, deadline_ns - now_ns);
  const int64_t spin_until_ns = now_ns + spin_ns;
  while (now_ns < spin_until_ns) {
    // Yield on every turn: if trainers and daemon share the cores, the writer may need this very core.
    sched_yield();
    if (word.load(std::memory_order_acquire) >= target) {
      return WaitResult::kReached;
    }
    now_ns = MonotonicNs();
  }

  // A count, not a flag: several threads of one client may sleep at once.
  waiting.fetch_add(1, std::memory_order_seq_cst);
  WaitResult result = WaitResult::kTimedOut;
  while (true) {
    const uint64_t value = word.load(std::memory_order_seq_cst);
    if (value >= target) {
      result = WaitResult::kReached;
      break;
    }
    now_ns = MonotonicNs();
    if (now_ns >= deadline_ns) {
      break;
    }
    const int64_t slice_ns = std::min(absl::ToInt64Nanoseconds(slice), deadline_ns - now_ns);
    const timespec timeout = {.tv_sec = slice_ns / 1'000'000'000, .tv_nsec = slice_ns % 1'000'000'000};
    // EAGAIN (the value has changed), ETIMEDOUT and a wake all mean: look again.
    if (Futex(word, FUTEX_WAIT, static_cast<uint32_t>(value), &timeout) != 0 && errno == EINTR) {
      result = word.load(std::memory_order_seq_cst) >= target ? WaitResult::kReached : WaitResult::kInterrupted;
      break;
    }
  }
  waiting.fetch_sub(1, std::memory_order_seq_cst);
  return result;
}

}  // namespace shardd
