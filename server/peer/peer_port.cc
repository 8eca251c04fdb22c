#include "server/peer/peer_port.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "common/clock/monotonic_now.h"
#include "common/shm/open_files.h"
#include "common/shm/unique_fd.h"
#include "common/status/status_macros.h"
#include "server/observe/log.h"
#include "server/peer/bound_sockets.h"
#include "server/peer/source_places.h"
#include "server/relay/relay.h"
#include "server/relay/relay_account.h"

namespace shardd {
namespace {

constexpr int kMaxAcceptsPerWake = 64;
// Between two looks at connections that wait for their first byte or for their source's account.
constexpr absl::Duration kSweepInterval = absl::Milliseconds(50);
// Without descriptors, the backlog keeps the connections for so long.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);
// Processor time of a connection, and of a TLS handshake with it.
constexpr absl::Duration kPrice = absl::Milliseconds(1);
constexpr absl::Duration kPriceOfTls = absl::Milliseconds(5);
constexpr double kSourceRate = 0.5;
constexpr absl::Duration kSourceBurst = absl::Seconds(1);

uint32_t SourceOf(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr;
  }
  const in6_addr& ip = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  uint32_t words[4] = {};
  std::memcpy(words, &ip, sizeof(words));
  // An IPv4 address in IPv6's form is itself; of others the first half is the network that a host may choose from.
  return IN6_IS_ADDR_V4MAPPED(&ip) ? words[3] : static_cast<uint32_t>(absl::HashOf(words[0], words[1]));
}

constexpr int64_t kFilesOfConnection = 3;

int Most(int most, int share) {
  return static_cast<int>(std::clamp<int64_t>(OpenFilesBeforeReserve() / kFilesOfConnection / share, 8, most));
}

RelayOptions RelayOf(const PeerPortOptions& options) {
  RelayOptions relay;
  relay.first_call_timeout = options.first_byte_timeout;
  relay.buffer_size_bytes = 64 << 10;  // gradients
  return relay;
}

}  // namespace

class PeerPort::Impl {
 public:
  Impl(const PeerPortOptions& options, BoundSockets bound) : options_(options), bound_(std::move(bound)) {}
  ~Impl() { Stop(); }

  absl::Status Serve(grpc::experimental::ExternalConnectionAcceptor* grpc) {
    grpc_ = grpc;
    epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
    wake_ = UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (!epoll_.valid() || !wake_.valid() || !Watch(wake_.get(), EPOLLIN) || !WatchListeners()) {
      return absl::ErrnoToStatus(errno, absl::StrCat("listen for other nodes on \"", options_.listen, "\""));
    }
    if (options_.strangers) {
      SHARDD_ASSIGN_OR_RETURN(relay_, Relay::Create(RelayOf(options_)));
    }
    thread_ = std::thread([this] { Run(); });
    pthread_setname_np(thread_.native_handle(), "shardd-peers");
    return absl::OkStatus();
  }

  void Stop() {
    if (!thread_.joinable()) {
      return;
    }
    stopping_.store(true);
    const uint64_t one = 1;
    if (::write(wake_.get(), &one, sizeof(one)) < 0) {
      LogError("stop the port of other nodes: eventfd write refused");
    }
    thread_.join();
    silent_.clear();
    bound_.sockets.clear();
  }

  int port() const { return bound_.port; }

 private:
  struct Silent {
    UniqueFd socket;
    uint32_t source;
    absl::Time deadline;
    std::shared_ptr<const void> place;
    bool spoken = false;  // and waits for its source's account
  };

  bool Watch(int fd, uint32_t events) {
    epoll_event event = {};
    event.events = events;
    event.data.fd = fd;
    return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  }

  bool WatchListeners() {
    return std::all_of(bound_.sockets.begin(), bound_.sockets.end(),
                       [this](const UniqueFd& socket) { return Watch(socket.get(), EPOLLIN); });
  }

  bool Listens(int fd) const {
    return std::any_of(bound_.sockets.begin(), bound_.sockets.end(),
                       [fd](const UniqueFd& socket) { return socket.get() == fd; });
  }

  void Run() {
    while (!stopping_.load()) {
      epoll_event events[64];
      const bool idle = silent_.empty() && accounts_.empty() && accept_resumes_ == absl::InfiniteFuture();
      const int count =
          ::epoll_wait(epoll_.get(), events, 64, idle ? -1 : static_cast<int>(kSweepInterval / absl::Milliseconds(1)));
      for (int i = 0; i < count; ++i) {
        const int fd = events[i].data.fd;
        if (Listens(fd)) {
          AcceptSome(fd);
        } else if (const auto it = silent_.find(fd); it != silent_.end()) {
          it->second.spoken = true;
          if (Settled(it->second)) silent_.erase(it);
        }
      }
      const absl::Time now = MonotonicNow();
      for (auto it = silent_.begin(); it != silent_.end();) {
        Silent& one = it->second;
        it = one.deadline <= now || (one.spoken && Settled(one)) ? silent_.erase(it) : std::next(it);
      }
      for (auto it = accounts_.begin(); it != accounts_.end();) {
        it = it->second.Credit(now) == kSourceBurst ? accounts_.erase(it) : std::next(it);
      }
      if (accept_resumes_ <= now) {
        accept_resumes_ = absl::InfiniteFuture();
        WatchListeners();
      }
    }
  }

  void AcceptSome(int listener) {
    for (int accepted = 0; accepted < kMaxAcceptsPerWake; ++accepted) {
      sockaddr_storage address = {};
      socklen_t size = sizeof(address);
      UniqueFd socket(::accept4(listener, reinterpret_cast<sockaddr*>(&address), &size, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket.valid()) {
        if (errno == EINTR || errno == ECONNABORTED) {
          continue;
        }
        if (errno != EAGAIN && errno != EWOULDBLOCK) {
          // EMFILE and similar errors would report the socket readable for ever.
          LogWarning(absl::StrCat("accept other nodes: ", absl::ErrnoToStatus(errno, "paused").message()));
          for (const UniqueFd& one : bound_.sockets) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, one.get(), nullptr);
          accept_resumes_ = MonotonicNow() + kAcceptPause;
        }
        return;
      }
      const uint32_t source = SourceOf(address);
      std::shared_ptr<const void> place = places_->Take(source);
      if (place == nullptr) {
        LogWarning("accept other nodes: too many connections of one host, or of all; one is closed");
        continue;
      }
      if (static_cast<int>(silent_.size()) >= options_.max_silent) {
        // A daemon speaks at once, so the one that has waited longest is none.
        silent_.erase(std::min_element(silent_.begin(), silent_.end(), [](const auto& a, const auto& b) {
          return a.second.deadline < b.second.deadline;
        }));
      }
      const int no_delay = 1;
      (void)::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &no_delay, sizeof(no_delay));
      const int fd = socket.get();
      if (Watch(fd, EPOLLIN | EPOLLRDHUP | EPOLLET)) {
        silent_.emplace(
            fd, Silent{std::move(socket), source, MonotonicNow() + options_.first_byte_timeout, std::move(place)});
      }
    }
  }

  // Whether it is gRPC's now, or closed. Otherwise its source has to wait.
  bool Settled(Silent& connection) {
    char first = 0;
    if (::recv(connection.socket.get(), &first, 1, MSG_PEEK | MSG_DONTWAIT) == 0) {
      return true;  // it has gone
    }
    const absl::Time now = MonotonicNow();
    RelayAccount& account = accounts_.try_emplace(connection.source, kSourceRate, kSourceBurst, now).first->second;
    if (account.Credit(now) <= absl::ZeroDuration()) {
      return false;
    }
    account.Pay(options_.tls ? kPriceOfTls : kPrice);
    int pair[2] = {-1, -1};
    absl::Status status = CheckOpenFiles("accept other nodes");
    if (status.ok() && !options_.strangers) {
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.socket.get(), nullptr);
      Give(connection.socket.release());
      return true;
    }
    if (status.ok() && ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0) {
      status = absl::ErrnoToStatus(errno, "accept other nodes: cannot make a pair of sockets");
    }
    if (!status.ok()) {
      LogWarning(std::string(status.message()));
      return true;
    }
    UniqueFd relays(pair[0]);
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.socket.get(), nullptr);
    relay_->Add(std::move(connection.socket), std::move(relays), connection.source, std::move(connection.place));
    Give(pair[1]);
    return true;
  }

  void Give(int fd) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters given;
    given.fd = fd;
    grpc_->HandleNewConnection(&given);
  }

  // Constant after Serve.
  const PeerPortOptions options_;
  grpc::experimental::ExternalConnectionAcceptor* grpc_ = nullptr;
  UniqueFd epoll_;
  UniqueFd wake_;
  const std::shared_ptr<SourcePlaces> places_ =
      std::make_shared<SourcePlaces>(Most(options_.max_connections_per_source, 4), Most(options_.max_connections, 2));
  std::unique_ptr<Relay> relay_;  // null: there are no strangers

  std::atomic<bool> stopping_ = false;

  // Used by the thread, and by Stop behind it.
  BoundSockets bound_;
  std::map<int, Silent> silent_;
  std::map<uint32_t, RelayAccount> accounts_;  // of sources, while they are not full
  absl::Time accept_resumes_ = absl::InfiniteFuture();

  std::thread thread_;  // last: starts when everything else exists
};

absl::StatusOr<std::unique_ptr<PeerPort>> PeerPort::Listen(const PeerPortOptions& options) {
  SHARDD_ASSIGN_OR_RETURN(BoundSockets bound, BindAll(options.listen));
  return std::unique_ptr<PeerPort>(new PeerPort(std::make_unique<Impl>(options, std::move(bound))));
}

PeerPort::PeerPort(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PeerPort::~PeerPort() = default;
int PeerPort::port() const { return impl_->port(); }
absl::Status PeerPort::Serve(grpc::experimental::ExternalConnectionAcceptor* grpc) { return impl_->Serve(grpc); }
void PeerPort::Stop() { impl_->Stop(); }

}  // namespace shardd
