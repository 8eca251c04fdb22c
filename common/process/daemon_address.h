#ifndef SHARDD_COMMON_PROCESS_DAEMON_ADDRESS_H_
#define SHARDD_COMMON_PROCESS_DAEMON_ADDRESS_H_

// Where a daemon listens, in the order in which the client library and shardctl look: at the address that is given, at
// the machine's socket, in this user's folders.

#include <string>

#include "absl/strings/string_view.h"

namespace shardd {

inline constexpr char kSystemSocket[] = "/run/shardd/shardd.sock";

// Returns `given`, else SHARDD_ADDRESS; empty: neither.
std::string DaemonAddress(absl::string_view given);

// Returns $XDG_RUNTIME_DIR/shardd; empty if the variable names no absolute path.
std::string RuntimeFolder();
// Returns /tmp/shardd-UID, which may be somebody else's.
std::string TemporaryFolder();

}  // namespace shardd

#endif  // SHARDD_COMMON_PROCESS_DAEMON_ADDRESS_H_
