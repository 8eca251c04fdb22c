#ifndef SHARDD_SERVER_OBSERVE_NOTIFY_H_
#define SHARDD_SERVER_OBSERVE_NOTIFY_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace shardd {

// Tells the service manager that started this process how it does, as systemd's `Type=notify` units expect it: `state`
// is lines of NAME=VALUE ("READY=1\nSTATUS=..."), one datagram to the Unix socket that NOTIFY_SOCKET names (a path, or
// an abstract name after '@'). OK, and nothing sent, where that variable is absent or empty. INVALID_ARGUMENT: it names
// no Unix socket. UNAVAILABLE: nobody receives there, or its queue is full: does not block.
absl::Status NotifyServiceManager(absl::string_view state);

}  // namespace shardd

#endif  // SHARDD_SERVER_OBSERVE_NOTIFY_H_
