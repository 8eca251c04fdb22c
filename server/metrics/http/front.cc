#include "server/metrics/http/front.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <openssl/err.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/clock/deadline.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr int kBacklog = 64;

sockaddr_in Ipv4(const std::string& host, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, host.c_str(), &address.sin_addr);
  return address;
}

int PortOf(int socket) {
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  return getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0 ? ntohs(address.sin_port) : 0;
}

void LimitSilence(int socket, absl::Duration silence) {
  const timeval limit = absl::ToTimeval(silence);
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

absl::Status Unavailable(const std::string& where) {
  return absl::UnavailableError(absl::StrCat("listen on ", where, ": ", std::strerror(errno)));
}

absl::StatusOr<UniqueFd> ListenOnPath(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("listen on ", path, ": the path is too long for a Unix socket"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  const auto* const at = reinterpret_cast<const sockaddr*>(&address);
  const UniqueFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  struct stat info = {};
  if (connect(probe.get(), at, sizeof(address)) == 0 || errno == EAGAIN) {  // EAGAIN: its backlog is full
    errno = EADDRINUSE;
    return Unavailable(path);
  }
  if (errno == ECONNREFUSED && lstat(path.c_str(), &info) == 0 && S_ISSOCK(info.st_mode)) unlink(path.c_str());
  UniqueFd listening(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (bind(listening.get(), at, sizeof(address)) != 0 || chmod(path.c_str(), 0660) != 0 ||
      listen(listening.get(), kBacklog) != 0) {
    return Unavailable(path);
  }
  return listening;
}

absl::StatusOr<UniqueFd> ListenOnPort(const MetricsAddress& where) {
  const sockaddr_in address = Ipv4(where.host, where.port);
  UniqueFd listening(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  setsockopt(listening.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(listening.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(listening.get(), kBacklog) != 0) {
    return Unavailable(absl::StrCat(where.host, ":", where.port));
  }
  return listening;
}

}  // namespace

// A client's socket, with TLS or without. Nothing blocks for longer than what is left of its visit.
class Front::Client {
 public:
  Client(UniqueFd socket, std::shared_ptr<SSL_CTX> context, const FrontLimits& limits)
      : limits_(limits), socket_(std::move(socket)), context_(std::move(context)) {
    if (context_ == nullptr) return;
    tls_ = SSL_new(context_.get());
    SSL_set_fd(tls_, socket_.get());
  }
  ~Client() {
    if (tls_ != nullptr) {
      if (greeted_) SSL_shutdown(tls_);
      SSL_free(tls_);
    }
    ERR_clear_error();
  }
  // The whole of TLS's greeting.
  bool Greet() {
    const Deadline deadline = Deadline::In(limits_.greeting);
    for (int result = 0; tls_ != nullptr && (result = SSL_accept(tls_)) != 1;) {
      if (!Await(SSL_get_error(tls_, result), deadline)) return false;
    }
    return greeted_ = true;
  }
  int fd() const { return socket_.get(); }
  int left_ms() const { return static_cast<int>(absl::ToInt64Milliseconds(end_.Left())); }
  // Some bytes have come that poll does not know of.
  bool pending() const { return tls_ != nullptr && SSL_pending(tls_) > 0; }
  // 0: nothing is there yet; -1: nothing comes any more.
  ssize_t Read(char* bytes, size_t size) {
    if (tls_ == nullptr) {
      const ssize_t read = recv(socket_.get(), bytes, size, 0);
      return read > 0 ? read : read < 0 && errno == EAGAIN ? 0 : -1;
    }
    ERR_clear_error();
    const int read = SSL_read(tls_, bytes, static_cast<int>(size));
    const int error = SSL_get_error(tls_, read);
    return read > 0 ? read : error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE ? 0 : -1;
  }
  bool Write(const char* bytes, size_t size) {
    while (size > 0) {
      ERR_clear_error();
      const ssize_t written = tls_ != nullptr ? SSL_write(tls_, bytes, static_cast<int>(size))
                                              : send(socket_.get(), bytes, size, MSG_NOSIGNAL);
      if (written > 0) {
        bytes += written;
        size -= static_cast<size_t>(written);
        continue;
      }
      const int error = tls_ != nullptr                  ? SSL_get_error(tls_, static_cast<int>(written))
                        : written < 0 && errno == EAGAIN ? SSL_ERROR_WANT_WRITE
                                                         : SSL_ERROR_SYSCALL;
      if (!Await(error, std::min(end_, Deadline::In(limits_.silence)))) return false;
    }
    return true;
  }

 private:
  // Until the socket is ready for what TLS wants; false: it wants nothing, or that does not come in time.
  bool Await(int error, Deadline deadline) const {
    const int64_t left_ms = absl::ToInt64Milliseconds(deadline.Left());
    pollfd ready{socket_.get(), static_cast<short>(error == SSL_ERROR_WANT_WRITE ? POLLOUT : POLLIN), 0};
    return (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE) && left_ms > 0 &&
           poll(&ready, 1, static_cast<int>(left_ms)) > 0;
  }

  const FrontLimits limits_;
  const UniqueFd socket_;
  const std::shared_ptr<SSL_CTX> context_;
  const Deadline end_ = Deadline::In(limits_.visit);
  SSL* tls_ = nullptr;
  bool greeted_ = false;
};

absl::StatusOr<std::unique_ptr<Front>> Front::Listen(const MetricsAddress& address, const TlsFiles& tls,
                                                     const FrontLimits& limits) {
  std::unique_ptr<Front> front(new Front(limits));
  if (!tls.certificate.empty()) {
    SHARDD_ASSIGN_OR_RETURN(front->tls_, TlsContexts::Create(tls));
  }
  if (address.path.empty()) {
    SHARDD_ASSIGN_OR_RETURN(front->socket_, ListenOnPort(address));
    front->port_ = PortOf(front->socket_.get());
  } else {
    SHARDD_ASSIGN_OR_RETURN(front->socket_, ListenOnPath(address.path));
    front->path_ = address.path;
  }
  front->stop_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  return front;
}

Front::~Front() {
  const uint64_t one = 1;
  (void)!write(stop_.get(), &one, sizeof(one));
  for (std::thread& thread : threads_) thread.join();
  if (!path_.empty()) unlink(path_.c_str());
}

void Front::Serve(int inner_port) {
  inner_port_ = inner_port;
  for (int i = 0; i < kThreads; ++i) threads_.emplace_back([this] { Work(); });
}

bool Front::Owns(int port) const {
  absl::MutexLock lock(&mutex_);
  return ports_.contains(port);
}

void Front::Work() {
  for (;;) {
    pollfd ready[] = {{socket_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
    if (poll(ready, 2, -1) < 0 && errno != EINTR) return;
    if (ready[1].revents != 0) return;
    UniqueFd accepted(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!accepted.valid()) {
      if (errno == EMFILE || errno == ENFILE) poll(&ready[1], 1, 100);  // until another client has gone
      continue;
    }
    Client client(std::move(accepted), tls_ == nullptr ? nullptr : tls_->Get(), limits_);
    if (client.Greet()) Pass(client);
  }
}

UniqueFd Front::Connect(int* port) {
  UniqueFd server(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in any = Ipv4("127.0.0.1", 0);
  const sockaddr_in inner = Ipv4("127.0.0.1", inner_port_);
  LimitSilence(server.get(), limits_.silence);
  if (bind(server.get(), reinterpret_cast<const sockaddr*>(&any), sizeof(any)) != 0) return UniqueFd();
  *port = PortOf(server.get());
  {
    absl::MutexLock lock(&mutex_);  // before the server may see it
    ports_.insert(*port);
  }
  if (connect(server.get(), reinterpret_cast<const sockaddr*>(&inner), sizeof(inner)) != 0) server.reset();
  return server;
}

void Front::Pass(Client& client) {
  int port = 0;
  UniqueFd server = Connect(&port);
  std::array<char, 16 << 10> bytes;
  const int silence_ms = static_cast<int>(absl::ToInt64Milliseconds(limits_.silence));
  while (server.valid()) {
    pollfd ready[] = {{client.fd(), POLLIN, 0}, {server.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
    const int limit_ms = std::min(silence_ms, client.left_ms());
    if (limit_ms == 0 || (!client.pending() && (poll(ready, 3, limit_ms) <= 0 || ready[2].revents != 0))) break;
    if (client.pending() || ready[0].revents != 0) {
      const ssize_t size = client.Read(bytes.data(), bytes.size());
      if (size < 0 || send(server.get(), bytes.data(), static_cast<size_t>(size), MSG_NOSIGNAL) != size) break;
    }
    if (ready[1].revents != 0) {
      const ssize_t size = recv(server.get(), bytes.data(), bytes.size(), 0);
      if (size <= 0 || !client.Write(bytes.data(), static_cast<size_t>(size))) break;
    }
  }
  absl::MutexLock lock(&mutex_);  // while the port is still this one's
  ports_.erase(port);
}

}  // namespace shardd
