#ifndef SHARDD_SERVER_OBSERVE_TRACE_SINK_H_
#define SHARDD_SERVER_OBSERVE_TRACE_SINK_H_

#include "absl/status/status.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// Where a trace goes. Thread-safe; no call blocks.
class TraceSink {
 public:
  virtual ~TraceSink() = default;
  // Encodes what of the start grows with the job, on the caller's thread. A message that comes in two parts is merged,
  // so what Send gives of the start joins it. At most once, before Send.
  virtual void Prepare(const v1::TraceJobResponse& start) = 0;
  // False: the reader is behind or gone, and a message of spans was dropped. Start and end always wait for the reader.
  virtual bool Send(const v1::TraceJobResponse& message) = 0;
  virtual void Finish(absl::Status status) = 0;
  // The reader went away: nobody wants the rest.
  virtual bool gone() const = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_OBSERVE_TRACE_SINK_H_
