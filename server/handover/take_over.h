#ifndef SHARDD_SERVER_HANDOVER_TAKE_OVER_H_
#define SHARDD_SERVER_HANDOVER_TAKE_OVER_H_

#include <string>

#include "absl/status/status.h"

namespace shardd {

// Asks the daemon that listens at `path`, if one does, to hand over to this process, and returns when its socket and
// its jobs are free. Blocks, five minutes at most. An error leaves that daemon as it was. If it ends
// on the way, that is none: the custodian gives its jobs to the next one. UNAVAILABLE: it does not answer. REQUIRES:
// this process is ready to serve.
absl::Status TakeOver(const std::string& path);

}  // namespace shardd

#endif  // SHARDD_SERVER_HANDOVER_TAKE_OVER_H_
