#ifndef SHARDD_COMMON_SHM_TIMELINE_H_
#define SHARDD_COMMON_SHM_TIMELINE_H_

// A timeline is a 64-bit counter in shared memory with a single writer. "Wait until timeline >= v" is the only ordering
// primitive between processes. A value is epoch << 40 | sequence, so a new epoch satisfies every older wait, and
// whoever wakes compares epochs. Thus a death releases every waiter, and no value ever decreases.

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"

namespace shardd {

using TimelineWord = std::atomic<uint64_t>;
static_assert(TimelineWord::is_always_lock_free && sizeof(TimelineWord) == 8);

inline constexpr int kTimelineSequenceBits = 40;
inline constexpr uint64_t kTimelineSequenceMask = (uint64_t{1} << kTimelineSequenceBits) - 1;

constexpr uint64_t TimelineValue(uint64_t epoch, uint64_t sequence) {
  return (epoch << kTimelineSequenceBits) | (sequence & kTimelineSequenceMask);
}
constexpr uint64_t TimelineEpoch(uint64_t value) { return value >> kTimelineSequenceBits; }
constexpr uint64_t TimelineSequence(uint64_t value) { return value & kTimelineSequenceMask; }

// Stores `value` and wakes waiters. The store and the load of `waiting` are sequentially consistent, like the waiter's,
// so no wake is lost. `waiting` may be in memory that a hostile process writes: it can only cost or save a system call.
// nullptr: never wakes. Wait-free except for FUTEX_WAKE.
void TimelineStore(TimelineWord& word, uint64_t value, const std::atomic<uint32_t>* waiting);

enum class WaitResult {
  kReached,  // word >= target; the word's epoch may be later than the target's
  kTimedOut,
  kInterrupted,  // a signal handler ran on this thread; a caller without a reason to stop waits again
};

// Waits until word >= target: first a load, then a bounded spin with sched_yield (`spin`), then FUTEX_WAIT on the low
// half with `waiting` set, in slices, at most for `limit`. Works on a read-only mapping of `word`; `waiting` must be
// writable. Never blocks beyond the limit, even if wakes are lost or the clock is set.
WaitResult TimelineWait(const TimelineWord& word, uint64_t target, std::atomic<uint32_t>& waiting, absl::Duration limit,
                        absl::Duration spin = absl::Microseconds(20));

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_TIMELINE_H_
