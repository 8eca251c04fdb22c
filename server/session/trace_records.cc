#include "server/session/trace_records.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace shardd {

void TraceRecords::SetTracing(bool tracing) {
  page_.page().tracing.store(tracing && !broken_ ? 1 : 0, std::memory_order_release);
}

std::optional<uint64_t> TraceRecords::Written() {
  if (broken_) {
    return std::nullopt;
  }
  const uint64_t written = view_.page().trace_written.load(std::memory_order_acquire);
  if (written < taken_ || written - taken_ > kTraceRecords) {
    broken_ = true;
    return std::nullopt;
  }
  return written;
}

bool TraceRecords::Take(size_t most, std::vector<TraceRecord>* out) {
  if (broken_) {
    return true;
  }
  const std::optional<uint64_t> written = Written();
  if (!written.has_value()) {
    return false;
  }
  const TraceRecord* ring = view_.At<TraceRecord>(offset_bytes_);
  const uint64_t end = taken_ + std::min<uint64_t>(most, *written - taken_);
  out->reserve(out->size() + (end - taken_));
  for (; taken_ < end; ++taken_) {
    TraceRecord record;  // copied once: the client may write it again at any moment
    std::memcpy(&record, &ring[taken_ % kTraceRecords], sizeof(record));
    out->push_back(record);
  }
  page_.page().trace_taken.store(taken_, std::memory_order_release);
  return true;
}

uint64_t TraceRecords::Drop() {
  const uint64_t written = Written().value_or(taken_);
  const uint64_t dropped = written - taken_;
  taken_ = written;
  page_.page().trace_taken.store(taken_, std::memory_order_release);
  return dropped;
}

}  // namespace shardd
