#ifndef SHARDD_CLIENT_C_DAEMON_CONNECT_H_
#define SHARDD_CLIENT_C_DAEMON_CONNECT_H_

// From an address to an attached rank: which daemon, a channel to it, and the unary calls.

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/c/host/interrupt.h"
#include "common/clock/deadline.h"
#include "common/shm/unique_fd.h"
#include "grpcpp/channel.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

struct Target {
  std::string address;      // "unix:/path"
  std::string socket_path;  // "/path"
  bool found_here = false;  // no address was given: the system's daemon, or one of this user's own
  bool own = false;         // the latter: whoever finds it ended starts the next one
  bool on_gpus = false;     // ... and it has those
};

// All of these take what may interrupt their waits; CANCELLED then.

// `address`, else SHARDD_ADDRESS, else the system's daemon where one listens, else this user's own, started if need be
// with `local_world` CPU devices, or with `device_memory` all GPUs where there are some. Blocks until that daemon
// accepts connections.
absl::StatusOr<Target> ResolveTarget(absl::string_view address, int local_world, bool device_memory, Deadline deadline,
                                     const Interrupt& interrupt);

// This user's own daemon again, which may have ended: started with the GPUs, or with `local_world` CPU devices, if need
// be. Blocks as ResolveTarget. REQUIRES: target.own.
absl::Status StartAgain(const Target& target, int local_world, Deadline deadline, const Interrupt& interrupt);

// `address`, else SHARDD_ADDRESS, else the system's daemon, whether or not one listens there.
absl::StatusOr<Target> GivenTarget(absl::string_view address);

// A connected socket. UNAVAILABLE naming path and error when nobody listens there.
// At most 10 s: while a live daemon's backlog is full.
absl::StatusOr<UniqueFd> ConnectUnix(const std::string& path, const Interrupt& interrupt = Interrupt::Never());

// A channel over one new connection; it never reconnects by itself. Does not block on a live daemon.
absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const Target& target, const Interrupt& interrupt);

// Blocks until the daemon has opened the job, at most until `deadline`. FAILED_PRECONDITION where it describes another
// one. Fills in what every request of this library says, and the answer's protocol version. `job_secret` empty: none is
// given.
absl::StatusOr<v1::OpenJobResponse> OpenJob(const std::shared_ptr<grpc::Channel>& channel, v1::OpenJobRequest request,
                                            const std::string& job_secret, Deadline deadline,
                                            const Interrupt& interrupt);
// FAILED_PRECONDITION where the daemon's digest of a job is not the client's own.
absl::Status CheckPlannedAlike(const std::string& job, const std::string& theirs, const std::string& ours);
absl::StatusOr<v1::AttachRankResponse> AttachRank(const std::shared_ptr<grpc::Channel>& channel,
                                                  const v1::AttachRankRequest& request, const std::string& job_secret,
                                                  Deadline deadline, const Interrupt& interrupt);

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_DAEMON_CONNECT_H_
