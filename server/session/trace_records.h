#ifndef SHARDD_SERVER_SESSION_TRACE_RECORDS_H_
#define SHARDD_SERVER_SESSION_TRACE_RECORDS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "common/shm/session_view.h"
#include "common/shm/trace_ring.h"

namespace shardd {

// The daemon's end of a session's trace ring: what the client measures of its own calls. Owns how far it has read.
// Loop-confined.
class TraceRecords {
 public:
  // The memory behind the views outlives it; the ring lies at `offset_bytes` of the client's.
  TraceRecords(SessionMemoryView view, DaemonPageView page, int64_t offset_bytes)
      : view_(view), page_(page), offset_bytes_(offset_bytes) {}

  // The client measures its calls, or not.
  void SetTracing(bool tracing);
  // Appends the next records that it has measured, at most `most`, as the client wrote them. False: it broke the ring's
  // rules, and nothing is taken from it any more.
  bool Take(size_t most, std::vector<TraceRecord>* out);
  // Passes over all that lies there; returns how many records that is.
  uint64_t Drop();

 private:
  // Records that were written; breaks the trace where that cannot be.
  std::optional<uint64_t> Written();

  const SessionMemoryView view_;
  const DaemonPageView page_;
  const int64_t offset_bytes_;
  uint64_t taken_ = 0;
  bool broken_ = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SESSION_TRACE_RECORDS_H_
