#ifndef SHARDD_COMMON_SHM_TRACE_RING_H_
#define SHARDD_COMMON_SHM_TRACE_RING_H_

// When each call of a traced rank began and ended, which only the trainer knows because few calls need the daemon. A
// ring in the session memory; single producer (the client), single consumer (the daemon's loop, every few
// milliseconds). Nobody waits for it: if it is full, the client counts the records that it drops.
//
// Record n is at index n % kTraceRecords. The client fills it and then stores ClientPage::trace_written = n + 1; the
// daemon copies it once, checks it, and stores DaemonPage::trace_taken. The client writes only while
// DaemonPage::tracing is not 0; otherwise a call costs no more than reading that word, which is in the line of the
// epoch that every call reads anyway.

#include <time.h>

#include <cstdint>

namespace shardd {

inline constexpr uint32_t kTraceRecords = 2048;
inline constexpr uint16_t kTraceCallFailed = 0x8000;

struct TraceRecord {
  int64_t begin_ns;  // TraceNowNs
  int64_t end_ns;    // of the call; not before begin_ns, nor after the next record's begin_ns
  int64_t step;      // step of the call
  int32_t group;     // -1: no group
  uint16_t call;     // v1::TraceCall; with kTraceCallFailed if it returned an error
  uint16_t lost;     // number of calls just before this one that found no room; 65535: that many or more
};
static_assert(sizeof(TraceRecord) == 32);

inline constexpr int64_t kTraceRingBytes = int64_t{kTraceRecords} * sizeof(TraceRecord);

// CLOCK_MONOTONIC in nanoseconds: one clock for all processes of the node.
inline int64_t TraceNowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_TRACE_RING_H_
