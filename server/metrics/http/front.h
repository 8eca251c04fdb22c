#ifndef SHARDD_SERVER_METRICS_HTTP_FRONT_H_
#define SHARDD_SERVER_METRICS_HTTP_FRONT_H_

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/shm/unique_fd.h"
#include "server/metrics/http/listen_address.h"
#include "server/metrics/http/tls_contexts.h"

namespace shardd {

// For how long a front waits for a client. Who gives or takes a byte now and then does not keep a thread.
struct FrontLimits {
  absl::Duration silence = absl::Seconds(6);   // of both sides; whole seconds
  absl::Duration greeting = absl::Seconds(2);  // TLS's
  absl::Duration visit = absl::Seconds(30);    // from the first byte to the last
};

// What civetweb, as Debian has it, cannot listen on: a Unix socket, and TLS. Passes bytes between clients and the HTTP
// server behind, which listens on the loopback and takes connections from this alone (Owns). So many clients at a time
// as there are threads; others wait, and each is let go within its limits. Thread-safe.
class Front {
 public:
  static constexpr int kThreads = 16;

  // Listens on `address`, a Unix socket (mode 0660; one that nobody listens on is replaced) or, with `tls`, host and
  // port. UNAVAILABLE: it cannot be listened on. INVALID_ARGUMENT: certificate or key cannot be used.
  static absl::StatusOr<std::unique_ptr<Front>> Listen(const MetricsAddress& address, const TlsFiles& tls,
                                                       const FrontLimits& limits);
  // Blocks until clients are let go.
  ~Front();
  Front(const Front&) = delete;
  Front& operator=(const Front&) = delete;

  // Begins, with the server on this port of 127.0.0.1. Once.
  void Serve(int inner_port);
  // Whether the connection that came to that server from this port of 127.0.0.1 is this one's.
  bool Owns(int port) const ABSL_LOCKS_EXCLUDED(mutex_);
  int port() const { return port_; }  // 0: a Unix socket

 private:
  class Client;
  explicit Front(const FrontLimits& limits) : limits_(limits) {}
  void Work() ABSL_LOCKS_EXCLUDED(mutex_);
  void Pass(Client& client) ABSL_LOCKS_EXCLUDED(mutex_);
  UniqueFd Connect(int* port) ABSL_LOCKS_EXCLUDED(mutex_);

  const FrontLimits limits_;
  UniqueFd socket_;
  UniqueFd stop_;     // readable: end
  std::string path_;  // of a Unix socket
  int port_ = 0;
  int inner_port_ = 0;
  std::unique_ptr<TlsContexts> tls_;  // null: none
  std::vector<std::thread> threads_;
  mutable absl::Mutex mutex_;
  std::set<int> ports_ ABSL_GUARDED_BY(mutex_);  // of connections to the server
};

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_HTTP_FRONT_H_
