#ifndef SHARDD_SERVER_SERVICE_LISTENER_H_
#define SHARDD_SERVER_SERVICE_LISTENER_H_

// One Unix socket serves gRPC and the fd channel:
//
//   accept -> SO_PEERCRED -> first byte  'P' -> PeerRegistry, then the relay (relay.h) owns the connection, gRPC its
//   end
//                                        'S' -> fd request -> handler -> one answer; closed when it was read
//                                        other, or none within first_byte_timeout -> closed
//
// One thread does all of this and never waits for one client: a silent connection takes a slot, not a thread. A gRPC
// connection beyond the limits is not just closed: its first call is answered with RESOURCE_EXHAUSTED and the reason.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/shm/fd_channel.h"
#include "common/shm/unique_fd.h"
#include "server/service/fd_reply.h"
#include "server/service/peer_registry.h"

namespace grpc {
class Server;
}

namespace shardd {

struct ListenerOptions {
  // From accept to the end of the fd request (for gRPC: to the first byte).
  absl::Duration first_byte_timeout = absl::Seconds(5);
  // Connections whose protocol is not known yet, or whose answer is open. More are closed at once.
  size_t max_pending_per_uid = 64;
  size_t max_pending = 512;
  // Answers with descriptors that the client has not read. More are RESOURCE_EXHAUSTED. Each may have kSessionFdCount
  // descriptors in flight, which count as open files of the daemon's user.
  size_t max_unread_per_uid = 64;
  size_t max_unread = 512;
  // Open gRPC connections. A rank needs one; each takes four descriptors of the daemon.
  size_t max_connections_per_uid = 2048;
  // Members of this group may see the jobs of all (PeerRegistry::MayView); empty: nobody.
  std::optional<uint32_t> view_gid = std::nullopt;
};

// Owns the socket, its lock file and the accept thread. Thread-safe.
class Listener {
 public:
  // Runs on the listener's thread; must pass the work on and return.
  using Handler = std::function<void(FdRequest request, PeerCredentials peer, FdReply reply)>;

  // Listens on `path`. gRPC connections go to `server`, which like `registry` must outlive Stop(). Creates the last
  // directory of `path` (0750) if it is absent, and locks "<path>.lock": only the holder of the lock touches `path`.
  // ALREADY_EXISTS: another daemon has the lock (named by pid). FAILED_PRECONDITION: the directory belongs to another
  // user or others may write to it, or `path` is not a socket. INVALID_ARGUMENT: `path` is too long for a Unix socket.
  // Does not block.
  static absl::StatusOr<std::unique_ptr<Listener>> Create(const std::string& path, grpc::Server* server,
                                                          PeerRegistry* registry, Handler handler,
                                                          ListenerOptions options = {});
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Accepts no more connections, closes undecided ones, removes the socket and its lock file. Open FdReplies live on,
  // and so do gRPC connections until this object is destroyed. Waits for the running handler. Idempotent; must not be
  // called from the handler.
  void Stop();

  const std::string& path() const;
  // Current number of undecided connections and open answers.
  size_t pending() const;
  // Current number of answers with descriptors that are not read.
  size_t unread() const;

 private:
  class Impl;
  explicit Listener(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_LISTENER_H_
