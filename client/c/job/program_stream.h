#ifndef SHARDD_CLIENT_C_JOB_PROGRAM_STREAM_H_
#define SHARDD_CLIENT_C_JOB_PROGRAM_STREAM_H_

#include "absl/status/status.h"
#include "client/c/attachment/attachment.h"
#include "client/c/job/graphs.h"

namespace shardd {

// The calls that order a job by the program's CUDA stream, or by its host again. FAILED_PRECONDITION for a job on the
// host, and while a graph of the stream is noted. Thread-compatible.
absl::Status SetCudaStream(Attachment& attachment, const Graphs& graphs, void* stream);
absl::Status ClearCudaStream(Attachment& attachment, const Graphs& graphs);

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_PROGRAM_STREAM_H_
