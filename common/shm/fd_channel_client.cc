#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/clock/deadline.h"
#include "common/shm/fd_channel.h"
#include "common/shm/fd_channel_internal.h"
#include "common/shm/slab_internal.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

using shm_internal::ErrnoStatus;

constexpr char kFetch[] = "fetch descriptors from";

absl::Status TimedOut(const std::string& path, absl::string_view waiting_for) {
  return absl::DeadlineExceededError(absl::StrCat(kFetch, " \"", path, "\": no ", waiting_for, " in time"));
}

// How long a wait may last, and who may end it.
struct Limit {
  Deadline deadline;
  const std::function<bool()>& interrupted;
};

absl::Status CheckInterrupt(const std::string& path, const Limit& limit) {
  return limit.interrupted != nullptr && limit.interrupted()
             ? absl::CancelledError(absl::StrCat(kFetch, " \"", path, "\": interrupted"))
             : absl::OkStatus();
}

// Waits until the socket is ready for `events`.
absl::Status WaitReady(const std::string& path, int socket, short events, const Limit& limit,
                       absl::string_view waiting_for) {
  const int64_t slice_ms = limit.interrupted != nullptr ? 50 : 60'000;
  while (true) {
    const absl::Duration left = limit.deadline.Left();
    if (left <= absl::ZeroDuration()) {
      return TimedOut(path, waiting_for);
    }
    const int64_t left_ms = std::min<int64_t>(absl::ToInt64Milliseconds(left) + 1, slice_ms);
    pollfd entry = {.fd = socket, .events = events, .revents = 0};
    const int ready = poll(&entry, 1, static_cast<int>(left_ms));
    if (ready > 0 || (ready < 0 && errno != EINTR)) {
      return absl::OkStatus();  // also on a socket error, which the next call reports
    }
    SHARDD_RETURN_IF_ERROR(CheckInterrupt(path, limit));
  }
}

absl::StatusOr<UniqueFd> Connect(const std::string& path, const Limit& limit) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat(kFetch, " \"", path, "\": not a path of a socket"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd socket_fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_fd.valid()) {
    return ErrnoStatus(errno, "open socket to", path);
  }
  while (connect(socket_fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno == EAGAIN) {  // the daemon's backlog is full; a Unix socket gives nothing to poll for
      if (limit.deadline.HasPassed()) {
        return TimedOut(path, "room in the daemon's backlog");
      }
      SHARDD_RETURN_IF_ERROR(CheckInterrupt(path, limit));
      absl::SleepFor(absl::Milliseconds(1));
    } else if (errno == ENOENT || errno == ECONNREFUSED) {
      return absl::UnavailableError(
          absl::StrCat(kFetch, " \"", path, "\": ", strerror(errno), "; is the daemon running?"));
    } else if (errno != EINTR) {
      return ErrnoStatus(errno, "connect to", path);
    }
  }
  return socket_fd;
}

absl::Status SendRequest(const std::string& path, int socket, uint64_t session_id, absl::string_view token,
                         FdRange range, int protocol_version) {
  shm_internal::RequestWire wire{};
  std::memcpy(wire.magic, shm_internal::kFdMagic, sizeof(wire.magic));
  wire.protocol_version = static_cast<uint32_t>(protocol_version);
  wire.session_id = session_id;
  std::memcpy(wire.token, token.data(), sizeof(wire.token));
  wire.first_descriptor = range.first;
  wire.descriptors = range.count;
  // If the daemon cannot get a pidfd itself (another PID namespace, kernel before 6.5), ours tells it of our death.
  const UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  const int fd = pidfd.get();
  iovec buffer = {.iov_base = &wire, .iov_len = sizeof(wire)};
  const ssize_t sent = shm_internal::SendWithDescriptors(socket, &buffer, 1, &fd, pidfd.valid() ? 1 : 0);
  if (sent < 0 && (errno == EPIPE || errno == ECONNRESET)) {
    return absl::UnavailableError(absl::StrCat(kFetch, " \"", path, "\": the daemon closed the connection"));
  }
  if (sent != static_cast<ssize_t>(sizeof(wire))) {
    return ErrnoStatus(sent < 0 ? errno : EMSGSIZE, "send request to", path);
  }
  return absl::OkStatus();
}

bool IsDevNull(int fd) {
  struct stat object {};
  return fstat(fd, &object) == 0 && S_ISCHR(object.st_mode) && object.st_rdev == makedev(1, 3);
}

// Reads until `bytes` is full; appends the descriptors that arrive to `fds`.
absl::Status ReceiveExactly(const std::string& path, int socket, char* bytes, size_t size_bytes, const Limit& limit,
                            std::vector<UniqueFd>& fds) {
  size_t done = 0;
  while (done < size_bytes) {
    SHARDD_RETURN_IF_ERROR(WaitReady(path, socket, POLLIN, limit, "answer"));
    iovec buffer = {.iov_base = bytes + done, .iov_len = size_bytes - done};
    alignas(cmsghdr) char control[CMSG_SPACE(shm_internal::kMaxDescriptors * sizeof(int))];
    msghdr message{};
    message.msg_iov = &buffer;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) {
      continue;
    }
    if (got < 0 && errno != ECONNRESET) {
      return ErrnoStatus(errno, "receive descriptors from", path);
    }
    if (got <= 0) {
      return absl::UnavailableError(absl::StrCat(kFetch, " \"", path, "\": the daemon closed the connection"));
    }
    for (UniqueFd& fd : shm_internal::TakeDescriptors(message)) {
      fds.push_back(std::move(fd));
    }
    done += static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<UniqueFd>> FetchSessionFds(const std::string& socket_path, uint64_t session_id,
                                                      absl::string_view token, absl::Duration timeout,
                                                      const std::function<bool()>& interrupted, FdRange range,
                                                      int protocol_version) {
  if (token.size() != static_cast<size_t>(kTokenBytes)) {
    return absl::InvalidArgumentError(absl::StrCat(kFetch, " \"", socket_path, "\": token has a wrong size (got ",
                                                   token.size(), " bytes, want ", kTokenBytes, ")"));
  }
  if (range.count == 0 || range.count > kMaxFdsAtOnce) {
    return absl::InvalidArgumentError(absl::StrCat(kFetch, " \"", socket_path, "\": number of descriptors is out of ",
                                                   "range (got ", range.count, ", want 1 to ", kMaxFdsAtOnce, ")"));
  }
  const Limit limit = {Deadline::In(timeout), interrupted};
  SHARDD_ASSIGN_OR_RETURN(const UniqueFd socket, Connect(socket_path, limit));
  SHARDD_RETURN_IF_ERROR(SendRequest(socket_path, socket.get(), session_id, token, range, protocol_version));

  std::vector<UniqueFd> fds;
  shm_internal::ReplyWire wire{};
  SHARDD_RETURN_IF_ERROR(
      ReceiveExactly(socket_path, socket.get(), reinterpret_cast<char*>(&wire), sizeof(wire), limit, fds));
  if (std::memcmp(wire.magic, shm_internal::kFdMagic, sizeof(wire.magic)) != 0 || wire.code < 0 || wire.code > 16 ||
      wire.text_bytes > shm_internal::kMaxReplyTextBytes) {
    return absl::InternalError(
        absl::StrCat(kFetch, " \"", socket_path, "\": the answer is not of this protocol (want \"SHFD\")"));
  }
  std::string text(wire.text_bytes, '\0');
  SHARDD_RETURN_IF_ERROR(ReceiveExactly(socket_path, socket.get(), text.data(), text.size(), limit, fds));
  if (wire.code != 0) {
    return absl::Status(static_cast<absl::StatusCode>(wire.code), text);
  }
  if (fds.size() != wire.descriptors || fds.size() != range.count) {
    return absl::InternalError(absl::StrCat(kFetch, " \"", socket_path, "\": wrong number of descriptors (got ",
                                            fds.size(), ", announced ", wire.descriptors, ", want ", range.count,
                                            "); is this process at its limit of open files?"));
  }
  for (UniqueFd& fd : fds) {
    if (IsDevNull(fd.get())) {
      fd.reset();
    }
  }
  return fds;
}

}  // namespace shardd
