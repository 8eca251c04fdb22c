#include "server/metrics/front.h"

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

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

// Silence of both sides, and a client that takes or gives nothing for so long.
constexpr int kSilenceMs = 6'000;
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

void LimitSilence(int socket) {
  const timeval limit = {kSilenceMs / 1000, 0};
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
  const UniqueFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  struct stat info = {};
  if (connect(probe.get(), at, sizeof(address)) == 0) {
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

// A client's socket, with TLS or without. Reads and writes block for kSilenceMs at most.
class Front::Client {
 public:
  Client(UniqueFd socket, std::shared_ptr<SSL_CTX> context) : socket_(std::move(socket)), context_(std::move(context)) {
    LimitSilence(socket_.get());
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
  // The whole of TLS's greeting within kSilenceMs: who has no certificate yet cannot stay by sending a byte now and
  // then.
  bool Greet() {
    if (tls_ == nullptr) return true;
    const absl::Time deadline = absl::Now() + absl::Milliseconds(kSilenceMs);
    const int flags = fcntl(socket_.get(), F_GETFL);
    fcntl(socket_.get(), F_SETFL, flags | O_NONBLOCK);
    for (int result = 0; (result = SSL_accept(tls_)) != 1;) {
      const int error = SSL_get_error(tls_, result);
      const int64_t left_ms = absl::ToInt64Milliseconds(deadline - absl::Now());
      pollfd ready{socket_.get(), static_cast<short>(error == SSL_ERROR_WANT_WRITE ? POLLOUT : POLLIN), 0};
      if ((error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) || left_ms <= 0 ||
          poll(&ready, 1, static_cast<int>(left_ms)) <= 0) {
        return false;
      }
    }
    fcntl(socket_.get(), F_SETFL, flags);
    return greeted_ = true;
  }
  int fd() const { return socket_.get(); }
  // Some bytes have come that poll does not know of.
  bool pending() const { return tls_ != nullptr && SSL_pending(tls_) > 0; }
  ssize_t Read(char* bytes, size_t size) {
    if (tls_ != nullptr) return SSL_read(tls_, bytes, static_cast<int>(size));
    return recv(socket_.get(), bytes, size, 0);
  }
  bool Write(const char* bytes, size_t size) {
    while (size > 0) {
      const ssize_t written = tls_ != nullptr ? SSL_write(tls_, bytes, static_cast<int>(size))
                                              : send(socket_.get(), bytes, size, MSG_NOSIGNAL);
      if (written <= 0) return false;
      bytes += written;
      size -= static_cast<size_t>(written);
    }
    return true;
  }

 private:
  const UniqueFd socket_;
  const std::shared_ptr<SSL_CTX> context_;
  SSL* tls_ = nullptr;
  bool greeted_ = false;
};

absl::StatusOr<std::unique_ptr<Front>> Front::Listen(const MetricsAddress& address, const TlsFiles& tls) {
  std::unique_ptr<Front> front(new Front());
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
    UniqueFd accepted(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!accepted.valid()) {
      if (errno == EMFILE || errno == ENFILE) poll(&ready[1], 1, 100);  // until another client has gone
      continue;
    }
    Client client(std::move(accepted), tls_ == nullptr ? nullptr : tls_->Get());
    if (client.Greet()) Pass(client);
  }
}

UniqueFd Front::Connect(int* port) {
  UniqueFd server(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in any = Ipv4("127.0.0.1", 0);
  const sockaddr_in inner = Ipv4("127.0.0.1", inner_port_);
  LimitSilence(server.get());
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
  while (server.valid()) {
    pollfd ready[] = {{client.fd(), POLLIN, 0}, {server.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
    if (!client.pending() && (poll(ready, 3, kSilenceMs) <= 0 || ready[2].revents != 0)) break;
    if (client.pending() || ready[0].revents != 0) {
      const ssize_t size = client.Read(bytes.data(), bytes.size());
      if (size <= 0 || send(server.get(), bytes.data(), static_cast<size_t>(size), MSG_NOSIGNAL) != size) break;
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
