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

// The process behind each gRPC connection. gRPC knows a connection of the listener only as "fd:8"
// (ServerContext::peer()), without credentials, so the listener registers them here under that number.
//
// A number names a connection only while its socket is open, and gRPC does not report when it closes one. So each entry
// also has the socket's inode, and is void if its descriptor is closed or is another file. The listener assigns numbers
// in rotation, so that a late handler of a closed connection does not meet a new one.
//
// Thread-safe.
class PeerRegistry {
 public:
  PeerRegistry() = default;
  PeerRegistry(const PeerRegistry&) = delete;
  PeerRegistry& operator=(const PeerRegistry&) = delete;

  // Registers `peer` for the open socket `fd` (not owned), replacing an older entry. `pidfd` may be invalid.
  // `in_view_group`: it has the group that may see all (view_group.h). INTERNAL: `fd` is not open.
  absl::Status Register(int fd, const PeerCredentials& peer, UniqueFd pidfd, bool in_view_group = false)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Forget(int fd) ABSL_LOCKS_EXCLUDED(mutex_);

  // `grpc_peer`: from ServerContext::peer(). UNAUTHENTICATED: not a connection of the listener, or closed.
  absl::StatusOr<PeerCredentials> Lookup(absl::string_view grpc_peer) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether the process may be the machine's administrator (root, or the daemon's user) by its uid: only one in the
  // daemon's own PID and user namespaces, because root of a container has uid 0 here too, and so has whoever a user
  // namespace lets keep its uid. False for a connection that Lookup refuses.
  bool MayAdminister(absl::string_view grpc_peer) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether it may see the jobs of all: it has the group, and is in the daemon's own PID and user namespaces, because
  // root of a container takes any group.
  bool MayView(absl::string_view grpc_peer) const ABSL_LOCKS_EXCLUDED(mutex_);
  // A new descriptor of the process's pidfd; invalid if there is none (or it cannot be duplicated).
  UniqueFd DupPidfd(absl::string_view grpc_peer) const ABSL_LOCKS_EXCLUDED(mutex_);

  // Drops the entries of closed connections, with their pidfds, and returns how many are left.
  size_t Sweep() ABSL_LOCKS_EXCLUDED(mutex_);
  // Number of entries of one uid; closed ones count until the next Sweep.
  size_t CountOfUid(uint32_t uid) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    uint64_t inode = 0;
    PeerCredentials peer;
    UniqueFd pidfd;
    bool shares_namespaces = false;  // as it was when it came; only of root, the daemon's user and the group
    bool in_view_group = false;
  };

  const Entry* FindLocked(absl::string_view grpc_peer) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  absl::flat_hash_map<int, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_PEER_REGISTRY_H_
