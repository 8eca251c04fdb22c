#ifndef SHARDD_SERVER_OBSERVE_NOTIFY_H_
#define SHARDD_SERVER_OBSERVE_NOTIFY_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace shardd {

// Reports to the service manager that started this process, as systemd's `Type=notify` units expect: `state` is lines
// of NAME=VALUE ("READY=1\nSTATUS=..."), one datagram to the Unix socket in NOTIFY_SOCKET (a path, or an abstract name
// after '@'). OK, and nothing sent: the variable is absent or empty. INVALID_ARGUMENT: it names no Unix socket.
// UNAVAILABLE: nobody receives there, or its queue is full. Does not block.
absl::Status NotifyServiceManager(absl::string_view state);

}  // namespace shardd

#endif  // SHARDD_SERVER_OBSERVE_NOTIFY_H_
