#include "server/service/listener.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/clock/monotonic_now.h"
#include "common/shm/open_files.h"
#include "common/shm/socket_path.h"
#include "common/status/status_macros.h"
#include "grpcpp/server.h"
#include "grpcpp/server_posix.h"
#include "server/observe/log.h"
#include "server/relay/relay.h"
#include "server/service/view_group.h"

namespace shardd {
namespace {

// gRPC connections get numbers from [kFirstGrpcFd, kLastGrpcFd] in rotation; the descriptor table grows to the highest.
constexpr int kFirstGrpcFd = 64;
constexpr int kLastGrpcFd = 16384;
constexpr int kMaxAcceptsPerWake = 64;
constexpr absl::Duration kSweepInterval = absl::Seconds(1);
// Without descriptors, the backlog keeps the connections for so long.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);

struct Pending {
  UniqueFd socket;
  PeerCredentials peer;
  absl::Time deadline;
  PendingSlot slot;
};

// Below the reserve, which is for what the daemon opens itself.
int HighestGrpcFd() { return static_cast<int>(std::clamp<int64_t>(OpenFilesBeforeReserve() - 1, 1, kLastGrpcFd)); }

}  // namespace

class Listener::Impl {
 public:
  Impl(std::unique_ptr<SocketPath> bound, grpc::Server* server, PeerRegistry* registry, Handler handler,
       const ListenerOptions& options)
      : path_(bound->path()),
        server_(server),
        registry_(registry),
        handler_(std::move(handler)),
        options_(options),
        bound_(std::move(bound)) {}

  absl::Status Start() {
    epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
    wake_ = UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    unread_ = std::make_shared<UnreadAnswers>(epoll_.get(),
                                              PendingCount::Limits{options_.max_unread_per_uid, options_.max_unread});
    if (!epoll_.valid() || !wake_.valid() || !Watch(wake_.get(), EPOLLIN) || !Watch(bound_->fd(), EPOLLIN)) {
      return absl::ErrnoToStatus(errno, absl::StrCat("listen \"", path_, "\": cannot set up epoll"));
    }
    SHARDD_ASSIGN_OR_RETURN(relay_, Relay::Create());
    absl::MutexLock lock(&stop_mutex_);
    thread_ = std::thread([this] { Run(); });
    pthread_setname_np(thread_.native_handle(), "shardd-listen");
    return absl::OkStatus();
  }

  void Stop() {
    absl::MutexLock lock(&stop_mutex_);
    if (!thread_.joinable()) {
      return;
    }
    stopping_.store(true);
    const uint64_t one = 1;
    if (::write(wake_.get(), &one, sizeof(one)) < 0) {
      LogError("stop listener: eventfd write refused");
    }
    thread_.join();
    pending_.clear();
    unread_->Close();
    bound_.reset();
  }

  const std::string& path() const { return path_; }
  size_t pending() const { return count_->total(); }
  size_t unread() const { return unread_->count(); }

 private:
  bool Watch(int fd, uint32_t events) {
    epoll_event event = {};
    event.events = events;
    event.data.fd = fd;
    return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  }

  void Run() {
    absl::Time next_sweep = MonotonicNow() + kSweepInterval;
    while (!stopping_.load()) {
      epoll_event events[64];
      const int count = ::epoll_wait(epoll_.get(), events, 64, TimeoutMs(next_sweep));
      for (int i = 0; i < count; ++i) {
        const int fd = events[i].data.fd;
        if (fd == bound_->fd()) {
          AcceptSome();
        } else if (fd != wake_.get()) {
          // It may be gone: events of one batch do not know of each other.
          if (const auto it = pending_.find(fd); it != pending_.end()) {
            Advance(it);
          } else {
            unread_->Advance(fd);
          }
        }
      }
      const absl::Time now = MonotonicNow();
      std::erase_if(pending_, [now](const auto& entry) { return entry.second.deadline <= now; });
      if (accept_resumes_ <= now) {
        accept_resumes_ = absl::InfiniteFuture();
        Watch(bound_->fd(), EPOLLIN);
      }
      if (next_sweep <= now) {
        registry_->Sweep();
        next_sweep = now + kSweepInterval;
      }
    }
  }

  int TimeoutMs(absl::Time wake) const {
    wake = std::min(wake, accept_resumes_);
    for (const auto& [fd, pending] : pending_) {
      wake = std::min(wake, pending.deadline);
    }
    // Rounded up: waking a fraction of a millisecond early would spin until the deadline.
    return static_cast<int>(std::max<int64_t>(0, absl::ToInt64Milliseconds(wake - MonotonicNow()) + 1));
  }

  void AcceptSome() {
    // Bounded: a client that connects in a loop would keep all others from being served.
    for (int accepted = 0; accepted < kMaxAcceptsPerWake; ++accepted) {
      UniqueFd socket(::accept4(bound_->fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket.valid()) {
        if (errno == EINTR || errno == ECONNABORTED) {
          continue;
        }
        if (errno != EAGAIN && errno != EWOULDBLOCK) {
          // EMFILE and similar errors would report the socket readable for ever.
          LogWarning(absl::StrCat("accept \"", path_, "\": ", absl::ErrnoToStatus(errno, "paused").message()));
          ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, bound_->fd(), nullptr);
          accept_resumes_ = MonotonicNow() + kAcceptPause;
        }
        return;
      }
      const absl::StatusOr<PeerCredentials> peer = GetPeerCredentials(socket.get());
      if (!peer.ok()) {
        LogWarning(absl::StrCat("accept \"", path_, "\": ", peer.status().message()));
        continue;
      }
      if (!count_->TryAcquire(peer->uid, options_.max_pending_per_uid, options_.max_pending)) {
        LogOf(peer->uid, LogLevel::kWarning,
              absl::StrCat("accept \"", path_, "\": too many undecided connections; one closed (uid=", peer->uid,
                           ", pid=", peer->pid, ")"));
        continue;
      }
      const int fd = socket.get();
      Pending pending{std::move(socket), *peer, MonotonicNow() + options_.first_byte_timeout,
                      PendingSlot(count_, peer->uid)};
      // Edge-triggered: bytes are peeked at and stay in the socket until the request is complete.
      if (Watch(fd, EPOLLIN | EPOLLRDHUP | EPOLLET)) {
        Advance(pending_.emplace(fd, std::move(pending)).first);  // most have sent something by now
      }
    }
  }

  using PendingIt = std::map<int, Pending>::iterator;

  void Advance(PendingIt it) {
    const int fd = it->first;
    char first = 0;
    const ssize_t bytes = ::recv(fd, &first, 1, MSG_PEEK | MSG_DONTWAIT);
    if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
      return;
    }
    if (bytes == 1 && first == 'P') {
      HandToGrpc(it);
      return;
    }
    if (bytes == 1 && first == kFdChannelFirstByte) {
      absl::StatusOr<FdRequest> request = ReadFdRequest(fd);
      if (absl::IsUnavailable(request.status())) {
        return;
      }
      if (request.ok()) {
        HandToHandler(it, *std::move(request));
        return;
      }
      LogOf(it->second.peer.uid, LogLevel::kWarning,
            absl::StrCat("fd channel: ", request.status().message(), " (uid=", it->second.peer.uid,
                         ", pid=", it->second.peer.pid, ")"));
    } else if (bytes == 1) {
      LogOf(it->second.peer.uid, LogLevel::kWarning,
            absl::StrCat("accept \"", path_, "\": neither gRPC nor the fd channel (first byte ",
                         static_cast<int>(static_cast<unsigned char>(first)), ", uid=", it->second.peer.uid,
                         ", pid=", it->second.peer.pid, ")"));
    }
    pending_.erase(it);
  }

  void HandToGrpc(PendingIt it) {
    const PeerCredentials peer = it->second.peer;
    // The client's socket keeps its number, and no number may be watched twice.
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, it->first, nullptr);
    UniqueFd client = std::move(it->second.socket);
    pending_.erase(it);
    if (absl::Status status = ConnectToGrpc(client, peer); !status.ok()) {
      LogOf(peer.uid, LogLevel::kWarning,
            absl::StrCat("accept \"", path_, "\": ", status.message(), " (pid=", peer.pid, ")"));
      relay_->Refuse(std::move(client), status);
    }
  }

  // Gives gRPC one end of a pair, and the relay the other end with `client`, which is not taken on failure.
  absl::Status ConnectToGrpc(UniqueFd& client, const PeerCredentials& peer) {
    if (registry_->CountOfUid(peer.uid) >= options_.max_connections_per_uid) {
      registry_->Sweep();
      if (registry_->CountOfUid(peer.uid) >= options_.max_connections_per_uid) {
        return absl::ResourceExhaustedError(absl::StrCat("connect: too many gRPC connections of uid ", peer.uid,
                                                         " (want at most ", options_.max_connections_per_uid,
                                                         "); close some, or raise the daemon's limit of open files"));
      }
    }
    SHARDD_RETURN_IF_ERROR(CheckOpenFiles("connect"));
    int pair[2] = {-1, -1};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0) {
      return absl::ErrnoToStatus(errno, "connect: cannot make a pair of sockets");
    }
    UniqueFd inner(pair[0]);
    const UniqueFd other(pair[1]);
    UniqueFd socket = RenumberForGrpc(other.get());
    if (!socket.valid()) {
      return absl::ResourceExhaustedError("connect: the daemon has no descriptor left for a gRPC connection");
    }
    const bool in_view_group = options_.view_gid.has_value() && IsPeerInGroup(client.get(), peer, *options_.view_gid);
    SHARDD_RETURN_IF_ERROR(registry_->Register(socket.get(), peer, GetPeerPidfd(client.get()), in_view_group));
    relay_->Add(std::move(client), std::move(inner), peer.uid);
    grpc::AddInsecureChannelFromFd(server_, socket.release());
    return absl::OkStatus();
  }

  // The lowest free number from the last one given, so that a number comes again only after a whole round.
  UniqueFd RenumberForGrpc(int fd) {
    const int highest = HighestGrpcFd();
    if (next_grpc_fd_ > highest) {
      next_grpc_fd_ = kFirstGrpcFd;
    }
    int renumbered = ::fcntl(fd, F_DUPFD_CLOEXEC, next_grpc_fd_);
    if (renumbered < 0 || renumbered > highest) {
      const UniqueFd too_high(renumbered);
      renumbered = ::fcntl(fd, F_DUPFD_CLOEXEC, std::min(kFirstGrpcFd, highest));
    }
    next_grpc_fd_ = renumbered < 0 ? kFirstGrpcFd : renumbered + 1;
    return UniqueFd(renumbered);
  }

  void HandToHandler(PendingIt it, FdRequest request) {
    const PeerCredentials peer = it->second.peer;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, it->first, nullptr);
    FdReply reply(std::move(it->second.socket), std::move(it->second.slot), unread_);
    pending_.erase(it);
    handler_(std::move(request), peer, std::move(reply));
  }

  // Constant after construction.
  const std::string path_;
  grpc::Server* const server_;
  PeerRegistry* const registry_;
  const Handler handler_;
  const ListenerOptions options_;
  const std::shared_ptr<PendingCount> count_ = std::make_shared<PendingCount>();
  UniqueFd epoll_;
  UniqueFd wake_;
  std::shared_ptr<UnreadAnswers> unread_;  // shared: a reply may outlive the listener
  std::unique_ptr<Relay> relay_;           // for connections that outlive Stop()

  std::atomic<bool> stopping_ = false;

  absl::Mutex stop_mutex_;
  std::thread thread_ ABSL_GUARDED_BY(stop_mutex_);

  // Used by the accept thread, and after it by Stop().
  std::unique_ptr<SocketPath> bound_;
  std::map<int, Pending> pending_;
  absl::Time accept_resumes_ = absl::InfiniteFuture();
  int next_grpc_fd_ = kFirstGrpcFd;
};

absl::StatusOr<std::unique_ptr<Listener>> Listener::Create(const std::string& path, grpc::Server* server,
                                                           PeerRegistry* registry, Handler handler,
                                                           ListenerOptions options) {
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<SocketPath> bound, SocketPath::Bind(path));
  auto impl = std::make_unique<Impl>(std::move(bound), server, registry, std::move(handler), options);
  SHARDD_RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<Listener>(new Listener(std::move(impl)));
}

Listener::Listener(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Listener::~Listener() { Stop(); }
void Listener::Stop() { impl_->Stop(); }
const std::string& Listener::path() const { return impl_->path(); }
size_t Listener::pending() const { return impl_->pending(); }
size_t Listener::unread() const { return impl_->unread(); }

}  // namespace shardd
