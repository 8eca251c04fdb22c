#ifndef SHARDD_CLIENT_C_SESSION_TRACE_WRITER_H_
#define SHARDD_CLIENT_C_SESSION_TRACE_WRITER_H_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "client/c/session/session_memory.h"
#include "common/shm/trace_ring.h"

namespace shardd {

// The producer's end of a session's ring of traced calls. Owns how many records were written and left out.
// Thread-compatible.
class TraceWriter {
 public:
  explicit TraceWriter(const SessionMemory& memory) : memory_(memory) {}

  // True while somebody traces the job. Costs one load.
  bool tracing() const { return memory_.page().tracing.load(std::memory_order_relaxed) != 0; }
  // Leaves the record out if the daemon has not kept up. Never waits.
  void Write(TraceRecord record) {
    if (written_ - memory_.page().trace_taken.load(std::memory_order_acquire) >= kTraceRecords) {
      ++lost_;
      return;
    }
    record.lost = static_cast<uint16_t>(std::min<uint64_t>(lost_, std::numeric_limits<uint16_t>::max()));
    lost_ = 0;
    memory_.trace_ring()[written_ % kTraceRecords] = record;
    memory_.view().page().trace_written.store(++written_, std::memory_order_release);
  }

 private:
  const SessionMemory& memory_;
  uint64_t written_ = 0;
  uint64_t lost_ = 0;  // since the last one
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_SESSION_TRACE_WRITER_H_
