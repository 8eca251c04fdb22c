#ifndef SHARDD_SERVER_OBSERVE_TRACE_SINK_H_
#define SHARDD_SERVER_OBSERVE_TRACE_SINK_H_

#include "absl/status/status.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// The destination of a trace. Thread-safe; no call blocks.
class TraceSink {
 public:
  virtual ~TraceSink() = default;
  // Encodes the large parts of the start on the caller's thread. Protobuf merges a message that arrives in two parts,
  // so Send adds the rest of the start. At most once, before Send.
  virtual void Prepare(const v1::TraceJobResponse& start) = 0;
  // Returns false if the reader is behind or gone and a message of spans was dropped. Start and end are never dropped.
  virtual bool Send(const v1::TraceJobResponse& message) = 0;
  virtual void Finish(absl::Status status) = 0;
  // The reader is gone: nobody wants the rest.
  virtual bool gone() const = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_OBSERVE_TRACE_SINK_H_
