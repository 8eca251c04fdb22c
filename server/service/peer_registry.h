#ifndef SHARDD_SERVER_SERVICE_PEER_REGISTRY_H_
#define SHARDD_SERVER_SERVICE_PEER_REGISTRY_H_

#include <cstddef>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "common/shm/fd_channel.h"
#include "common/shm/unique_fd.h"

namespace shardd {

// Who is behind each gRPC connection. gRPC knows a connection that the listener accepted only as "fd:8"
// (ServerContext::peer()) and knows no peer credentials at all, so the listener leaves them here under that number.
//
// A number names a connection only as long as the socket is open, and gRPC does not tell when it closes one: each entry
// also holds the socket's inode, and an entry whose descriptor is closed or is another file now is no entry. The
// listener gives numbers out in rotation, so that a late handler of a closed connection does not meet a new one's.
//
// Thread-safe.
class PeerRegistry {
 public:
  PeerRegistry() = default;
  PeerRegistry(const PeerRegistry&) = delete;
  PeerRegistry& operator=(const PeerRegistry&) = delete;

  // The open socket `fd` (not owned) is `peer`. `pidfd` may be invalid. Replaces what the number meant before.
  // INTERNAL: `fd` is not open.
  absl::Status Register(int fd, const PeerCredentials& peer, UniqueFd pidfd) ABSL_LOCKS_EXCLUDED(mutex_);
  void Forget(int fd) ABSL_LOCKS_EXCLUDED(mutex_);

  // `grpc_peer`: what ServerContext::peer() says. UNAUTHENTICATED: not a connection of the listener, or it is closed.
  absl::StatusOr<PeerCredentials> Lookup(absl::string_view grpc_peer) const ABSL_LOCKS_EXCLUDED(mutex_);
  // A new descriptor of the peer's pidfd; invalid where there is none (or none can be made).
  UniqueFd DupPidfd(absl::string_view grpc_peer) const ABSL_LOCKS_EXCLUDED(mutex_);

  // Drops the entries of closed connections, pidfds included, and returns how many are left.
  size_t Sweep() ABSL_LOCKS_EXCLUDED(mutex_);
  // Entries of one uid; closed ones count until the next Sweep.
  size_t CountOfUid(uint32_t uid) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    uint64_t inode = 0;
    PeerCredentials peer;
    UniqueFd pidfd;
  };

  const Entry* FindLocked(absl::string_view grpc_peer) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  absl::flat_hash_map<int, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_PEER_REGISTRY_H_
