#ifndef SHARDD_CLIENT_C_DAEMON_AUTOSTART_H_
#define SHARDD_CLIENT_C_DAEMON_AUTOSTART_H_

// A daemon of this user's own, so that nobody has to learn operations before the first step. Its folder is
// $XDG_RUNTIME_DIR/shardd or /tmp/shardd-UID, mode 0700, and holds
//   shardd.sock      the daemon's socket
//   autostart.lock   flock: one starter at a time, so ranks that start at the same moment get one daemon
//   shardd.log       the daemon's output, and its custodian's
//   shardd-custody.sock  the custodian's, which the daemon starts
// and shardd-cuda.sock, shardd-cuda.log of a daemon with all GPUs, which is another one.
// The daemon runs in a session of its own, with no descriptor of the trainer, and ends after its last job.

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/c/host/interrupt.h"
#include "common/clock/deadline.h"

namespace shardd {

struct AutostartOptions {
  int devices = 1;    // CPU devices of a daemon that has to be started
  bool gpus = false;  // the daemon with all GPUs instead
  Deadline deadline = Deadline::Never();
  absl::Duration stall_timeout = absl::Seconds(20);  // of a daemon that is starting, and neither runs nor logs anything
  const Interrupt* interrupt = &Interrupt::Never();  // of the waits
};

// Path of a socket on which this user's daemon accepts connections; starts one if none does. Blocks while that daemon
// makes progress, at most until the deadline, or 5 min. With `gpus` a daemon whose build has no kernels for them is no
// error: one with CPUs takes its place, and a line on stderr says so.
// NOT_FOUND: no daemon binary (says where was looked). PERMISSION_DENIED: the folder belongs to somebody else or is
// open to others. CANCELLED: interrupted. UNAVAILABLE: the daemon died or never listened (with the end of its log).
absl::StatusOr<std::string> FindOrStartDaemon(const AutostartOptions& options);

// The daemon's binary, as an absolute path: SHARDD_DAEMON, beside this library, ../bin of it, PATH.
absl::StatusOr<std::string> FindDaemonBinary();

// This user's folder, made if need be and checked.
absl::StatusOr<std::string> UserFolder();

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_DAEMON_AUTOSTART_H_
