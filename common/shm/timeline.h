#ifndef SHARDD_COMMON_SHM_TIMELINE_H_
#define SHARDD_COMMON_SHM_TIMELINE_H_

// A timeline is a 64-bit counter in shared memory with a single writer; "wait until timeline >= v" is the only ordering
// primitive between processes. A value is epoch << 40 | sequence, so a new epoch satisfies every older wait; whoever
// wakes then compares epochs. That is how a death releases everybody without ever going back.

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

// Stores `value` and wakes waiters. The store and the look at `waiting` are sequentially consistent, as the waiter's
// are, so no wake is lost. `waiting` may lie in memory that a hostile process writes: it only costs or saves a system
// call. nullptr: never wake. Wait-free but for the FUTEX_WAKE.
void TimelineStore(TimelineWord& word, uint64_t value, const std::atomic<uint32_t>* waiting);

enum class WaitResult {
  kReached,  // word >= target; its epoch may be later than the target's
  kTimedOut,
  kInterrupted,  // a signal handler has run on this thread; whoever has no reason to stop waits again
};

// Waits until word >= target: a load; then a bounded spin with sched_yield (`spin`); then FUTEX_WAIT on the low half
// with `waiting` set, in slices, until `deadline`. Works on a read-only mapping of `word`; `waiting` must be writable.
// Never blocks longer than the deadline, also where wakes get lost.
WaitResult TimelineWait(const TimelineWord& word, uint64_t target, std::atomic<uint32_t>& waiting, absl::Time deadline,
                        absl::Duration spin = absl::Microseconds(20));

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_TIMELINE_H_
