#ifndef SHARDD_SERVER_STORAGE_KEPT_FORMATS_H_
#define SHARDD_SERVER_STORAGE_KEPT_FORMATS_H_

// The formats of what a custodian keeps of a job, all together.

#include "absl/status/status.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

v1::KeptFormats KeptFormatsOf(int job_record, int journal, int take_up_log);

// FAILED_PRECONDITION: whoever asks could not take up a job of these formats; names the first that it does not read.
absl::Status CheckReads(const v1::HandOverRequest& request, const v1::KeptFormats& formats);

}  // namespace shardd

#endif  // SHARDD_SERVER_STORAGE_KEPT_FORMATS_H_
