#ifndef SHARDD_COMMON_SHM_FD_CHANNEL_H_
#define SHARDD_COMMON_SHM_FD_CHANNEL_H_

// The fd channel passes descriptors, which gRPC cannot. A client opens a second connection to the daemon's Unix socket
// and sends one request; the daemon answers once and closes. The first byte tells gRPC ('P' of "PRI * HTTP/2") from
// this protocol ('S').
//
//   request (40 bytes):  "SHFD" | u32 protocol version, the session's | u64 session id | 16 bytes token | u32 first
//   descriptor
//                        | u32 descriptors, 0: kSessionFdCount
//                        + optionally one descriptor: the client's own pidfd
//   answer:              "SHFD" | i32 status code | u32 text length | u32 descriptors | text; SCM_RIGHTS with them
//   descriptors, in order: kFd... below; if slabs lie on several GPUs, then those of each slab's further pieces
//                        (AttachRankResponse.device_slabs). One message carries at most kMaxFdsAtOnce, so a client
//                        fetches more with more requests, and never has more in flight for a session.
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
#include "common/versions/versions.h"

namespace shardd {

inline constexpr char kFdChannelFirstByte = 'S';
inline constexpr int kTokenBytes = 16;
inline constexpr uint32_t kMaxFdsAtOnce = 253;  // the kernel's limit of descriptors in one message (SCM_MAX_FD)

// Descriptors that the daemon sends, in this order. /dev/null stands for an absent one.
enum SessionFd : int {
  kFdSessionMemory = 0,  // sealed memfd, read-write
  kFdDaemonPage = 1,     // frozen memfd
  kFdDoorbell = 2,       // eventfd, write 1 to wake the daemon's loop
  kFdShards = 3,         // slab "shards", read-only
  kFdParameters = 4,     // slab "parameters" (cast copy), read-only; absent: unshard from shards
  kFdPool = 5,           // slab "unsharded pool", read-only; absent unless POOLED
  kFdGradients = 6,      // slab "gradients", read-write: trainers may write it from BackwardDone to Step (clipping,
                         // unscaling); absent: nothing is trained
  kFdOptimizer = 7,      // slab "optimizer": read-write for an optimizer in the trainers, else read-only; absent: none
  kFdGradientSlots = 8,  // the rank's gradient slots, read-write (GPUs, or AttachRankResponse.slots_apart); absent: in
                         // the session memory
  kSessionFdCount = 9,
};

// Descriptor number of rank 0's gradient slots, which this session's sums read; rank r's is this + r.
// FAILED_PRECONDITION: the rank has no session, or the job's trainers reduce nothing.
inline constexpr uint32_t kFdFirstPeerSlots = uint32_t{1} << 20;

// The descriptors [first, first + count) of a session.
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

// Client: connects to `socket_path`, sends a request, and returns exactly `range.count` descriptors, in order and with
// CLOEXEC; absent ones are invalid (valid() == false). Blocks for at most `timeout`. INTERNAL: the daemon sent another
// number of descriptors. UNAVAILABLE: there is no daemon, or it hung up. A refusal of the daemon is returned with its
// own status. Calls `interrupted` every 50 ms of waiting and after each signal; if it returns true, the result is
// CANCELLED.
absl::StatusOr<std::vector<UniqueFd>> FetchSessionFds(const std::string& socket_path, uint64_t session_id,
                                                      absl::string_view token, absl::Duration timeout,
                                                      const std::function<bool()>& interrupted = nullptr,
                                                      FdRange range = {},
                                                      int protocol_version = kProtocolVersions.newest);

// Daemon: reads a request from an accepted socket; never blocks. UNAVAILABLE: nothing has arrived; call again when
// readable. A request travels in one sendmsg, so anything else (short, long, end of stream, another protocol) is
// INVALID_ARGUMENT: hang up. Closes all descriptors except one, and that one too unless it is a pidfd of the process at
// the other end.
absl::StatusOr<FdRequest> ReadFdRequest(int socket);
// Sends status and descriptors (not consumed; -1: absent; none with an error). Does not block: the answer fits into an
// empty socket buffer. Descriptors are in flight until the client reads the answer, even if the sender closes its
// copies. RESOURCE_EXHAUSTED: the user of this process has too many in flight, and nothing is sent.
absl::Status SendFdReply(int socket, const absl::Status& status, const std::vector<int>& fds);

struct PeerCredentials {
  uint32_t uid = 0;
  uint32_t gid = 0;
  int32_t pid = 0;  // 0: not visible from this PID namespace
};
// Credentials of the process at the other end of `socket`. PERMISSION_DENIED: this user namespace does not map its uid.
absl::StatusOr<PeerCredentials> GetPeerCredentials(int socket);
// A pidfd of the process at the other end, from SO_PEERPIDFD (kernel 6.5). Invalid on older kernels, for which the
// client sends one.
UniqueFd GetPeerPidfd(int socket);

// "unix:/path", "/path" -> "/path"; INVALID_ARGUMENT for anything else or longer than 107 characters.
absl::StatusOr<std::string> ParseUnixAddress(absl::string_view address);

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_FD_CHANNEL_H_
