#ifndef SHARDD_CLIENT_C_DAEMON_DESCRIBE_H_
#define SHARDD_CLIENT_C_DAEMON_DESCRIBE_H_

// What a daemon says of itself and of a job, as JSON, for trainers and tests that want its own count of the work done.

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/c/daemon/connect.h"
#include "client/c/host/interrupt.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// Asks the daemon of a GivenTarget. Starts none.
absl::StatusOr<std::string> DescribeDaemonJson(absl::string_view address, absl::Duration timeout);

// Asks `target` for the job with this id and name: that of another user may have the name, too. NOT_FOUND: it has none.
// One unary call.
absl::StatusOr<v1::Job> DescribeJob(const Target& target, const std::string& name, uint64_t job_id,
                                    const std::string& job_secret, absl::Duration timeout, const Interrupt& interrupt);
// The same as JSON.
absl::StatusOr<std::string> DescribeJobJson(const Target& target, const std::string& name, uint64_t job_id,
                                            const std::string& job_secret, absl::Duration timeout,
                                            const Interrupt& interrupt);

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_DAEMON_DESCRIBE_H_
