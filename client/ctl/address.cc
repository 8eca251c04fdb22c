#include "client/ctl/address.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/process/daemon_address.h"
#include "common/shm/fd_channel.h"
#include "common/status/status_macros.h"

namespace shardd::ctl {
namespace {

// connect() on a Unix socket blocks while the listener's backlog is full.
constexpr int kConnectTimeoutSeconds = 10;

// Of the folders that only this user's daemon may hold: somebody else's, in /tmp, would be a trap.
bool IsOwnFolder(const std::string& folder) {
  struct stat info;
  return ::lstat(folder.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == ::geteuid();
}

absl::StatusOr<UniqueFd> Connect(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError("path is too long for a Unix socket");
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval timeout = {kConnectTimeoutSeconds, 0};
  if (!socket.valid() || ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) != 0 ||
      ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      ::fcntl(socket.get(), F_SETFL, O_NONBLOCK) != 0) {
    const int error = errno;
    return error == EACCES || error == EPERM ? absl::PermissionDeniedError(std::strerror(error))
                                             : absl::UnavailableError(std::strerror(error));
  }
  return socket;
}

}  // namespace

std::vector<std::string> UsualSocketPaths() {
  std::vector<std::string> paths = {kSystemSocket};
  if (const std::string runtime = RuntimeFolder(); !runtime.empty()) {
    paths.push_back(runtime + "/shardd.sock");
  }
  paths.push_back(TemporaryFolder() + "/shardd.sock");
  return paths;
}

absl::StatusOr<Connection> ConnectToDaemon(const std::string& address) {
  if (const std::string given = DaemonAddress(address); !given.empty()) {
    SHARDD_ASSIGN_OR_RETURN(std::string path, ParseUnixAddress(given));
    absl::StatusOr<UniqueFd> socket = Connect(path);
    if (!socket.ok()) {
      if (absl::IsPermissionDenied(socket.status())) {
        return absl::UnavailableError(
            absl::StrCat("connect \"", path,
                         "\": this user may not (Permission denied); be its owner or a member "
                         "of the socket's group"));
      }
      return absl::UnavailableError(absl::StrCat("connect \"", path, "\": no daemon there (", socket.status().message(),
                                                 "); start one with `shardd --listen=unix:", path,
                                                 "`, or give the --address of one that runs"));
    }
    return Connection{std::move(path), *std::move(socket)};
  }
  std::vector<std::string> tried;
  for (const std::string& path : UsualSocketPaths()) {
    if (path != kSystemSocket && !IsOwnFolder(path.substr(0, path.rfind('/')))) {
      tried.push_back(absl::StrCat(path, " (no folder of this user)"));
      continue;
    }
    absl::StatusOr<UniqueFd> socket = Connect(path);
    if (socket.ok()) {
      return Connection{path, *std::move(socket)};
    }
    tried.push_back(absl::StrCat(path, " (", socket.status().message(), ")"));
  }
  return absl::UnavailableError(absl::StrCat("find daemon: none listens, tried ", absl::StrJoin(tried, ", "),
                                             "; start one, or give --address or SHARDD_ADDRESS"));
}

}  // namespace shardd::ctl
