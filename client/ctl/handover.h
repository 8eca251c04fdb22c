#ifndef SHARDD_CLIENT_CTL_HANDOVER_H_
#define SHARDD_CLIENT_CTL_HANDOVER_H_

#include <string>

#include "absl/status/statusor.h"
#include "client/ctl/options.h"

namespace shardd::ctl {

// Has the daemon at `path` start the one that takes its place (SIGUSR2), and returns when that one answers: text for
// people. Blocks up to options.timeout. FAILED_PRECONDITION: it cannot hand over, and says why. PERMISSION_DENIED: the
// caller may not signal it. ABORTED: the next one has failed, and the daemon goes on. DEADLINE_EXCEEDED: neither.
absl::StatusOr<std::string> HandOver(const std::string& path, const Options& options);

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_HANDOVER_H_
