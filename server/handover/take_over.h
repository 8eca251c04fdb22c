#ifndef SHARDD_SERVER_HANDOVER_TAKE_OVER_H_
#define SHARDD_SERVER_HANDOVER_TAKE_OVER_H_

#include <string>

#include "absl/status/status.h"

namespace shardd {

// Asks the daemon that listens at `path`, if one does, to hand over to this process, and returns when its socket and
// its jobs are free. Blocks, five minutes at most. An error leaves that daemon as it was, or means that it has ended on
// the way (UNAVAILABLE). REQUIRES: this process is ready to serve.
absl::Status TakeOver(const std::string& path);

}  // namespace shardd

#endif  // SHARDD_SERVER_HANDOVER_TAKE_OVER_H_
