#ifndef SHARDD_CLIENT_CTL_TRACE_TRACE_H_
#define SHARDD_CLIENT_CTL_TRACE_TRACE_H_

#include <string>

#include "absl/status/statusor.h"
#include "client/ctl/options.h"
#include "shardd/v1/jobs.grpc.pb.h"

namespace shardd::ctl {

// Traces `job` and writes options.output; blocks until the steps are there, at most options.timeout and a little.
// Returns what to tell: where it is and how to open it; nothing where the trace itself goes to standard output. What
// there is is written also where the steps are not all there, but for a trace without a whole step where a file lies
// already: ABORTED: the job ended; OUT_OF_RANGE: the time was over; or why the daemon was lost. INTERNAL: the file
// cannot be written, which is found out first.
absl::StatusOr<std::string> TraceToFile(v1::JobsService::Stub& stub, const v1::JobRef& job, const Options& options);

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_TRACE_TRACE_H_
