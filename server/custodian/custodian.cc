#include "server/custodian/custodian.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/clock/monotonic_now.h"
#include "common/process/namespaces.h"
#include "server/custodian/wire.h"

namespace shardd {
namespace {

constexpr absl::Duration kSend = absl::Seconds(5);  // to an owner that reads nothing
constexpr absl::Duration kTick = absl::Seconds(1);
constexpr absl::Duration kFirstOwner = absl::Seconds(20);  // an embedded one's, which has started it

void Say(absl::string_view text) {
  std::fprintf(stderr, "shardd-custodian: %.*s\n", static_cast<int>(text.size()), text.data());
}

}  // namespace

absl::StatusOr<std::unique_ptr<Custodian>> Custodian::Create(Options options) {
  absl::StatusOr<std::unique_ptr<SocketPath>> socket = SocketPath::Bind(options.path, SOCK_SEQPACKET, 0600);
  if (!socket.ok()) return socket.status();
  size_t most_objects = kMostObjects;
  if (rlimit files{}; getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < kMostObjects + kDescriptorsForOthers) {
    most_objects = files.rlim_cur - std::min<size_t>(files.rlim_cur, kDescriptorsForOthers);
  }
  std::unique_ptr<Custodian> custodian(new Custodian(std::move(options), *std::move(socket), most_objects));
  custodian->ends_ = MonotonicNow() + kFirstOwner;
  return custodian;
}

void Custodian::Run(int stop) {
  for (;;) {
    std::vector<pollfd> polled = {{stop, POLLIN, 0}, {socket_->fd(), POLLIN, 0}};
    for (const Connection& connection : connections_) polled.push_back({connection.socket.get(), POLLIN, 0});
    if (poll(polled.data(), polled.size(), static_cast<int>(absl::ToInt64Milliseconds(kTick))) < 0 && errno != EINTR) {
      Say("poll fails; it ends");
      return;
    }
    if (polled[0].revents != 0) return;
    size_t i = 2;
    for (auto it = connections_.begin(); it != connections_.end();) {
      const bool over = polled[i++].revents != 0 && !Serve(*it);
      if (over) Close(*it);
      it = over ? connections_.erase(it) : std::next(it);
    }
    if (polled[1].revents != 0) Accept();
    FreeUnowned();
    if (options_.embedded && owner_ == nullptr && !HasJobs() && MonotonicNow() >= ends_) return;
  }
}

bool Custodian::HasJobs() const { return objects_.lower_bound({1, ""}) != objects_.end(); }  // 0 is the daemon

void Custodian::Accept() {
  UniqueFd socket(accept4(socket_->fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (!socket.valid() || getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return;
  if (peer.uid != geteuid()) {
    Say(absl::StrCat("uid ", peer.uid, " is refused (pid ", peer.pid, ", want uid ", geteuid(), ")"));
    return;
  }
  if (IsInOtherUserNamespace(peer.pid)) {  // as this uid, which root of a container may have
    Say(absl::StrCat("pid ", peer.pid, " is refused: it is in another user namespace"));
    return;
  }
  if (connections_.size() >= kMostConnections) {
    Say(absl::StrCat("pid ", peer.pid, " is refused: there are ", connections_.size(), " connections"));
    return;
  }
  connections_.push_back({std::move(socket), peer.pid});
}

bool Custodian::Serve(Connection& connection) {
  UniqueFd fd;
  const absl::StatusOr<CustodyMessage> request = ReceiveCustody(connection.socket.get(), &fd, absl::ZeroDuration());
  if (!request.ok()) return absl::IsDeadlineExceeded(request.status());
  absl::Status status = Do(connection, *request, std::move(fd));
  CustodyMessage answer;
  answer.version = request->version;
  answer.newest = request->op == CustodyOp::kOwn && status.ok() ? connection.version : 0;
  answer.op = request->op == CustodyOp::kList && status.ok() ? CustodyOp::kEnd : CustodyOp::kAnswer;
  answer.code = static_cast<int32_t>(status.code());
  answer.SetText(status.message());
  return SendCustody(connection.socket.get(), answer, -1, kSend).ok();
}

absl::Status Custodian::Own(Connection& connection, const CustodyMessage& request) {
  const absl::StatusOr<int> version =
      CommonVersion("version of custody", {"this custodian", kCustodyVersions},
                    {"the daemon", SaidRange(request.version, static_cast<int>(request.newest))});
  if (!version.ok()) return absl::UnimplementedError(version.status().message());  // not to be tried again
  if (owner_ != nullptr && owner_ != &connection) {
    return absl::FailedPreconditionError(absl::StrCat("pid ", owner_->pid, " owns what is kept here"));
  }
  connection.version = *version;
  owner_ = &connection;
  unowned_since_ = absl::InfiniteFuture();
  ends_ = absl::InfinitePast();
  return absl::OkStatus();
}

absl::Status Custodian::Do(Connection& connection, const CustodyMessage& request, UniqueFd fd) {
  if (request.op == CustodyOp::kOwn) return Own(connection, request);
  if (owner_ != &connection) return absl::FailedPreconditionError("the sender is not the owner");
  if (request.version != connection.version) {
    return absl::InvalidArgumentError(absl::StrCat("a request of another version of custody (got ", request.version,
                                                   ", want ", connection.version, ", as agreed)"));
  }
  switch (request.op) {
    case CustodyOp::kPut: {
      if (!fd.valid() || !IsCustodyName(request.name)) {
        return absl::InvalidArgumentError("put: want a descriptor and a name of a-z, 0-9, space and '-'");
      }
      const std::pair<uint64_t, std::string> key = {request.job, request.name};
      if (objects_.size() >= most_objects_ && objects_.count(key) == 0) {
        return absl::ResourceExhaustedError(absl::StrCat("put: the custodian is full (got ", objects_.size(),
                                                         " objects already, want at most ", most_objects_,
                                                         "); raise its limit of open files, or close a job"));
      }
      objects_[key] = std::move(fd);
      return absl::OkStatus();
    }
    case CustodyOp::kDrop:
      objects_.erase(objects_.lower_bound({request.job, ""}),
                     request.job == UINT64_MAX ? objects_.end() : objects_.lower_bound({request.job + 1, ""}));
      return absl::OkStatus();
    case CustodyOp::kList:
      return List(connection);
    default:
      return absl::InvalidArgumentError(absl::StrCat("unknown request ", static_cast<int>(request.op)));
  }
}

absl::Status Custodian::List(const Connection& connection) {
  for (const auto& [key, fd] : objects_) {
    CustodyMessage object;
    object.version = static_cast<uint16_t>(connection.version);
    object.op = CustodyOp::kObject;
    object.job = key.first;
    object.SetName(key.second);
    if (absl::Status sent = SendCustody(connection.socket.get(), object, fd.get(), kSend); !sent.ok()) return sent;
  }
  return absl::OkStatus();
}

void Custodian::Close(const Connection& connection) {
  if (owner_ != &connection) return;
  Say(absl::StrCat("pid ", connection.pid, " has gone; ", objects_.size(), " objects wait for another daemon"));
  owner_ = nullptr;
  unowned_since_ = MonotonicNow();
}

void Custodian::FreeUnowned() {
  if (owner_ != nullptr || objects_.empty() || MonotonicNow() - unowned_since_ < options_.unowned) return;
  Say(absl::StrCat("no daemon has come for ", absl::FormatDuration(options_.unowned), "; ", objects_.size(),
                   " objects are freed (--custody_ms)"));
  objects_.clear();
}

}  // namespace shardd
