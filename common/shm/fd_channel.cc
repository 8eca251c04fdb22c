#include "common/shm/fd_channel.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/shm/fd_channel_internal.h"
#include "common/shm/slab_internal.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace shardd {
namespace shm_internal {

std::vector<UniqueFd> TakeDescriptors(const msghdr& message) {
  std::vector<UniqueFd> fds;
  auto* mutable_message = const_cast<msghdr*>(&message);  // the signature of CMSG_NXTHDR; nothing is changed
  for (cmsghdr* header = CMSG_FIRSTHDR(mutable_message); header != nullptr;
       header = CMSG_NXTHDR(mutable_message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  return fds;
}

ssize_t SendWithDescriptors(int socket, iovec* buffers, size_t count, const int* fds, size_t fd_count) {
  msghdr message{};
  message.msg_iov = buffers;
  message.msg_iovlen = count;
  std::vector<char> control(fd_count > 0 ? CMSG_SPACE(fd_count * sizeof(int)) : 0);
  if (fd_count > 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fd_count * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds, fd_count * sizeof(int));
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  return sent;
}

}  // namespace shm_internal

namespace {

// Only a pidfd has a line "Pid:" there. Any other descriptor that a client sends in its place, even a pidfd of another
// process, might never become readable, or at once.
bool IsPidfdOf(int fd, int32_t pid) {
  FILE* info = std::fopen(absl::StrCat("/proc/self/fdinfo/", fd).c_str(), "re");
  if (info == nullptr) {
    return false;
  }
  int named = 0;
  char line[256];
  while (named == 0 && std::fgets(line, sizeof(line), info) != nullptr) {
    (void)std::sscanf(line, "Pid: %d", &named);
  }
  std::fclose(info);
  return named > 0 && named == pid;
}

}  // namespace

absl::StatusOr<FdRequest> ReadFdRequest(int socket) {
  // One byte more than a request, to notice a longer one; room for one descriptor, so that the kernel drops a second
  // one before it takes a number of ours.
  char bytes[sizeof(shm_internal::RequestWire) + 1];
  iovec buffer = {.iov_base = bytes, .iov_len = sizeof(bytes)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &buffer;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_LEN(sizeof(int));
  ssize_t got;
  do {
    got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return absl::UnavailableError("read descriptor request: nothing has arrived yet; call again when readable");
    }
    return shm_internal::ErrnoStatus(errno, "read descriptor request", absl::StrCat("socket ", socket));
  }
  std::vector<UniqueFd> fds = shm_internal::TakeDescriptors(message);
  shm_internal::RequestWire wire{};
  std::memcpy(&wire, bytes, std::min(static_cast<size_t>(got), sizeof(wire)));
  if (got != static_cast<ssize_t>(sizeof(wire))) {
    return absl::InvalidArgumentError(absl::StrCat("read descriptor request: wrong size (got ", got, " bytes",
                                                   got > static_cast<ssize_t>(sizeof(wire)) ? " or more" : "",
                                                   ", want ", sizeof(wire), ")"));
  }
  if (std::memcmp(wire.magic, shm_internal::kFdMagic, sizeof(wire.magic)) != 0) {
    return absl::InvalidArgumentError("read descriptor request: the first bytes are not \"SHFD\"");
  }
  if (wire.descriptors > kMaxFdsAtOnce) {
    return absl::InvalidArgumentError(absl::StrCat("read descriptor request: too many at once (got ", wire.descriptors,
                                                   ", want at most ", kMaxFdsAtOnce, ")"));
  }
  FdRequest request;
  request.protocol_version = wire.protocol_version;
  request.session_id = wire.session_id;
  request.token.assign(wire.token, sizeof(wire.token));
  request.range = {wire.first_descriptor, wire.descriptors == 0 ? uint32_t{kSessionFdCount} : wire.descriptors};
  if (!fds.empty()) {
    const absl::StatusOr<PeerCredentials> peer = GetPeerCredentials(socket);
    if (peer.ok() && IsPidfdOf(fds.front().get(), peer->pid)) {
      request.pidfd = std::move(fds.front());
    }
  }
  return request;
}

absl::Status SendFdReply(int socket, const absl::Status& status, const std::vector<int>& fds) {
  const std::string text(status.message().substr(0, shm_internal::kMaxReplyTextBytes));
  std::vector<int> sent_fds;
  UniqueFd absent;
  if (status.ok()) {
    if (fds.size() > shm_internal::kMaxDescriptors) {
      return absl::InvalidArgumentError(absl::StrCat("send descriptors: too many (got ", fds.size(), ", want at most ",
                                                     shm_internal::kMaxDescriptors, ")"));
    }
    sent_fds = fds;
    for (int& fd : sent_fds) {
      if (fd < 0) {
        if (!absent.valid()) {
          absent.reset(open("/dev/null", O_RDONLY | O_CLOEXEC));
        }
        if (!absent.valid()) {
          return shm_internal::ErrnoStatus(errno, "open", "/dev/null");
        }
        fd = absent.get();
      }
    }
  }
  shm_internal::ReplyWire wire{};
  std::memcpy(wire.magic, shm_internal::kFdMagic, sizeof(wire.magic));
  wire.code = static_cast<int32_t>(status.raw_code());
  wire.text_bytes = static_cast<uint32_t>(text.size());
  wire.descriptors = static_cast<uint32_t>(sent_fds.size());
  iovec buffers[2] = {{.iov_base = &wire, .iov_len = sizeof(wire)},
                      {.iov_base = const_cast<char*>(text.data()), .iov_len = text.size()}};
  const ssize_t sent =
      shm_internal::SendWithDescriptors(socket, buffers, text.empty() ? 1 : 2, sent_fds.data(), sent_fds.size());
  if (sent < 0 && (errno == EPIPE || errno == ECONNRESET)) {
    return absl::UnavailableError("send descriptors: the client has closed the connection");
  }
  if (sent < 0 && errno == ETOOMANYREFS) {
    return absl::ResourceExhaustedError(
        "send descriptors: this user has as many in flight as it may have files open (RLIMIT_NOFILE); clients that do "
        "not "
        "read their answers hold them");
  }
  if (sent != static_cast<ssize_t>(sizeof(wire) + text.size())) {
    return absl::InternalError(absl::StrCat("send descriptors: ", sent < 0 ? strerror(errno) : "short write", " (got ",
                                            sent, ", want ", sizeof(wire) + text.size(), " bytes)"));
  }
  return absl::OkStatus();
}

namespace {

// The uid that the kernel shows for uids outside of our user namespace; -1 if all are mapped.
int64_t UnmappedUid() {
  int64_t inside = 0, outside = 0, count = 0, overflow = -1;
  std::ifstream map("/proc/self/uid_map");
  if (map >> inside >> outside >> count && inside == 0 && outside == 0 && count >= 0xFFFFFFFF) {
    return -1;
  }
  std::ifstream("/proc/sys/kernel/overflowuid") >> overflow;
  return overflow;
}

}  // namespace

absl::StatusOr<PeerCredentials> GetPeerCredentials(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    return shm_internal::ErrnoStatus(errno, "read credentials of socket", absl::StrCat(socket));
  }
  // The kernel invents uid -1 for a socket without another end.
  if (length != sizeof(peer) || peer.uid == static_cast<uid_t>(-1)) {
    return absl::InternalError(absl::StrCat("read credentials of socket \"", socket, "\": the kernel knows no peer"));
  }
  // Users without a number in this user namespace all look alike, so none of them can own anything.
  static const int64_t unmapped_uid = UnmappedUid();
  if (int64_t{peer.uid} == unmapped_uid) {
    return absl::PermissionDeniedError(absl::StrCat("read credentials of socket \"", socket, "\": uid ", peer.uid,
                                                    " stands for every user that this user namespace does not map"));
  }
  return PeerCredentials{.uid = peer.uid, .gid = peer.gid, .pid = peer.pid};
}

UniqueFd GetPeerPidfd(int socket) {
  int fd = -1;
  socklen_t length = sizeof(fd);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &length) == 0 && fd >= 0) {
    return UniqueFd(fd);
  }
  return UniqueFd();  // its pid might be another process by now
}

absl::StatusOr<std::string> ParseUnixAddress(absl::string_view address) {
  absl::string_view path = address;
  if (absl::StartsWith(path, "unix:")) {
    path.remove_prefix(5);
  }
  while (absl::StartsWith(path, "//")) {  // "unix:///run/x", as gRPC writes it
    path.remove_prefix(1);
  }
  if (path.size() < 2 || path.front() != '/' || path.find('\0') != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("parse address \"", address, "\": not a Unix socket (want \"unix:/path\" or \"/path\")"));
  }
  constexpr size_t kMaxPathBytes = sizeof(sockaddr_un::sun_path) - 1;
  if (path.size() > kMaxPathBytes) {
    return absl::InvalidArgumentError(absl::StrCat("parse address \"", address, "\": path is too long (got ",
                                                   path.size(), " bytes, want at most ", kMaxPathBytes, ")"));
  }
  return std::string(path);
}

}  // namespace shardd
