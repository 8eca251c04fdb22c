#ifndef SHARDD_COMMON_SHM_FD_CHANNEL_H_
#define SHARDD_COMMON_SHM_FD_CHANNEL_H_

// gRPC cannot carry descriptors. A client connects to the daemon's Unix socket a second time and sends one request; the
// daemon answers once and closes. The first byte tells gRPC ('P' of "PRI * HTTP/2") from this protocol ('S').
//
//   request (40 bytes):  "SHFD" | u32 protocol version | u64 session id | 16 bytes token | u32 first descriptor
//                        | u32 descriptors, 0: kSessionFdCount
//                        + optionally one descriptor: the client's own pidfd
//   answer:              "SHFD" | i32 status code | u32 text length | u32 descriptors | text; SCM_RIGHTS with them
//   descriptors, in order: kFd... below, then, where slabs lie on several GPUs, those of their pieces behind the first
//                        (AttachRankResponse.device_slabs). One message holds kMaxFdsAtOnce of them, so more are
//                        fetched by more requests, and neither end ever has more than that in flight for a session.
//                        With JobConfig.trainer_sums also kFdFirstPeerSlots + r, one at a time.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/shm/unique_fd.h"

namespace shardd {

inline constexpr char kFdChannelFirstByte = 'S';
inline constexpr int kTokenBytes = 16;
inline constexpr uint32_t kMaxFdsAtOnce = 253;  // the kernel's own limit of descriptors in one message (SCM_MAX_FD)

// What the daemon sends, in this order; absent ones are marked in the order's place by /dev/null.
enum SessionFd : int {
  kFdSessionMemory = 0,  // sealed memfd, read-write
  kFdDaemonPage = 1,     // frozen memfd
  kFdDoorbell = 2,       // eventfd, write 1 to wake the daemon's loop
  kFdShards = 3,         // slab "shards", read-only
  kFdParameters = 4,     // slab "parameters" (cast copy), read-only; absent: unshard from shards
  kFdPool = 5,           // slab "unsharded pool", read-only; absent unless POOLED
  kFdGradients = 6,      // slab "gradients", read-write: trainers may write it from BackwardDone to Step (clipping,
                         // unscaling); absent where nothing is trained
  kFdOptimizer = 7,      // slab "optimizer": read-write for an optimizer in the trainers, else read-only; absent: none
  kFdGradientSlots = 8,  // the rank's gradient slots, read-write, where they are no part of the session memory (GPUs);
                         // else absent
  kSessionFdCount = 9,
};

// The gradient slots of rank r's session, which this session's sums read: one descriptor, at this + r.
// FAILED_PRECONDITION: the rank has no session, or the job's trainers add nothing.
inline constexpr uint32_t kFdFirstPeerSlots = uint32_t{1} << 20;

// Which descriptors of a session: [first, first + count).
struct FdRange {
  uint32_t first = 0;
  uint32_t count = kSessionFdCount;  // 1 to kMaxFdsAtOnce
};

struct FdRequest {
  uint32_t protocol_version = 0;
  uint64_t session_id = 0;
  std::string token;  // kTokenBytes
  FdRange range;
  UniqueFd pidfd;  // may be invalid
};

// Client: connects to `socket_path`, sends, receives. Bounded by `timeout`. Descriptors arrive with CLOEXEC; exactly
// `range.count` are returned, in order; absent ones are invalid (valid() == false). Another number of them is INTERNAL.
// A refusal of the daemon comes back as its own status; UNAVAILABLE: no daemon there, or it hung up. `interrupted` is
// asked every 50 ms of waiting and after each signal; true ends it with CANCELLED.
absl::StatusOr<std::vector<UniqueFd>> FetchSessionFds(const std::string& socket_path, uint64_t session_id,
                                                      absl::string_view token, absl::Duration timeout,
                                                      const std::function<bool()>& interrupted = nullptr,
                                                      FdRange range = {});

// Daemon, on an accepted socket; never blocks. UNAVAILABLE: nothing has arrived, call again when readable. A request
// travels in one sendmsg, so anything but all of it (short, long, end of stream) is INVALID_ARGUMENT, as is what is not
// this protocol: hang up. Descriptors beyond the one allowed are closed, and so is one that is no pidfd of the peer.
absl::StatusOr<FdRequest> ReadFdRequest(int socket);
// Sends status and descriptors (not consumed; -1: absent; none are sent with an error). Does not block: the answer fits
// into an empty socket buffer. Descriptors are in flight until the client reads the answer, whatever the sender closes;
// RESOURCE_EXHAUSTED, and nothing is sent: the user of this process has too many of them.
absl::Status SendFdReply(int socket, const absl::Status& status, const std::vector<int>& fds);

struct PeerCredentials {
  uint32_t uid = 0;
  uint32_t gid = 0;
  int32_t pid = 0;  // 0: not visible from this PID namespace
};
// PERMISSION_DENIED: a uid that this user namespace does not map.
absl::StatusOr<PeerCredentials> GetPeerCredentials(int socket);
// A pidfd of the peer: SO_PEERPIDFD (kernel 6.5). Invalid on older kernels: there it is the client that sends one.
UniqueFd GetPeerPidfd(int socket);

// "unix:/path", "/path" -> "/path"; INVALID_ARGUMENT for anything else or longer than 107 characters.
absl::StatusOr<std::string> ParseUnixAddress(absl::string_view address);

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_FD_CHANNEL_H_
