#include "common/shm/socket_path.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr int kBacklog = 1024;

absl::Status Errno(absl::string_view what, const std::string& path) {
  return absl::ErrnoToStatus(errno, absl::StrCat("listen \"", path, "\": ", what));
}

// The directory decides who can replace the socket, so it must be the daemon's own (or root's, like /run).
absl::Status PrepareDirectory(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string directory = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  if (::mkdir(directory.c_str(), 0750) != 0 && errno != EEXIST) {
    return Errno(absl::StrCat("cannot create directory \"", directory, "\""), path);
  }
  // The owner of a symbolic link can point it elsewhere: check both the link and its target.
  struct stat link;
  struct stat info;
  if (::lstat(directory.c_str(), &link) != 0 || ::stat(directory.c_str(), &info) != 0) {
    return Errno(absl::StrCat("cannot examine directory \"", directory, "\""), path);
  }
  if (!S_ISDIR(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrFormat("listen \"%s\": \"%s\" is not a directory", path, directory));
  }
  for (const uid_t owner : {link.st_uid, info.st_uid}) {
    if (owner != ::geteuid() && owner != 0) {
      return absl::FailedPreconditionError(
          absl::StrFormat("listen \"%s\": directory \"%s\" belongs to another user (got uid %d, want %d); remove it or "
                          "choose another path",
                          path, directory, owner, ::geteuid()));
    }
  }
  if ((info.st_mode & 0022) != 0 && (info.st_mode & S_ISVTX) == 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("listen \"%s\": directory \"%s\" is writable for others (got mode %04o, want 0750); chmod it",
                        path, directory, info.st_mode & 07777));
  }
  return absl::OkStatus();
}

std::string HolderOf(int lock) {
  char text[32] = {};
  const ssize_t bytes = ::pread(lock, text, sizeof(text) - 1, 0);
  const std::string pid(absl::StripAsciiWhitespace(absl::string_view(text, bytes > 0 ? bytes : 0)));
  return pid.empty() ? "unknown" : pid;
}

absl::StatusOr<UniqueFd> TakeLock(const std::string& path) {
  const std::string lock_path = absl::StrCat(path, ".lock");
  for (;;) {
    UniqueFd lock(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!lock.valid()) {
      return Errno(absl::StrCat("cannot open lock file \"", lock_path, "\""), path);
    }
    if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) {
        return absl::AlreadyExistsError(
            absl::StrFormat("listen \"%s\": another daemon serves it (pid %s holds lock \"%s\"); stop it or choose "
                            "another path",
                            path, HolderOf(lock.get()), lock_path));
      }
      return Errno(absl::StrCat("cannot lock \"", lock_path, "\""), path);
    }
    // The former holder removes the file as it ends, so the locked file may no longer be the one at that name.
    struct stat locked;
    struct stat named;
    if (::fstat(lock.get(), &locked) != 0) {
      return Errno("cannot examine the lock file", path);
    }
    if (::lstat(lock_path.c_str(), &named) != 0 || named.st_ino != locked.st_ino || named.st_dev != locked.st_dev) {
      continue;
    }
    const std::string pid = absl::StrCat(::getpid(), "\n");
    if (::ftruncate(lock.get(), 0) != 0 ||
        ::pwrite(lock.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
      return Errno("cannot write the lock file", path);
    }
    return lock;
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<SocketPath>> SocketPath::Bind(const std::string& path, int type, mode_t mode) {
  // One byte of sun_path is the terminating zero.
  if (path.empty() || path.size() >= sizeof(sockaddr_un::sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("listen \"%s\": path has a wrong length for a Unix socket (got %d, want 1 to %d)", path,
                        path.size(), sizeof(sockaddr_un::sun_path) - 1));
  }
  SHARDD_RETURN_IF_ERROR(PrepareDirectory(path));
  SHARDD_ASSIGN_OR_RETURN(UniqueFd lock, TakeLock(path));
  std::unique_ptr<SocketPath> bound(new SocketPath(path, std::move(lock)));
  SHARDD_RETURN_IF_ERROR(bound->BindAndListen(type, mode));
  return bound;
}

absl::Status SocketPath::BindAndListen(int type, mode_t mode) {
  struct stat info;
  if (::lstat(path_.c_str(), &info) == 0) {
    if (!S_ISSOCK(info.st_mode)) {
      return absl::FailedPreconditionError(
          absl::StrCat("listen \"", path_, "\": the path exists and is no socket; remove it or choose another path"));
    }
    // Nobody listens there, as the lock shows. A daemon that was killed left it.
    if (::unlink(path_.c_str()) != 0) {
      return Errno("cannot remove the stale socket", path_);
    }
  }
  UniqueFd listening(::socket(AF_UNIX, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!listening.valid()) {
    return Errno("cannot create a socket", path_);
  }
  // Before bind, so that the path never exists with a wider mode; after it, for the bits that umask removed.
  if (::fchmod(listening.get(), mode) != 0) {
    return Errno("cannot set the socket's mode", path_);
  }
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path_.data(), path_.size());
  if (::bind(listening.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Errno("cannot bind", path_);
  }
  if (::lstat(path_.c_str(), &info) != 0) {
    return Errno("cannot examine the socket", path_);
  }
  inode_ = info.st_ino;
  if (::chmod(path_.c_str(), mode) != 0) {
    return Errno("cannot set the socket's mode", path_);
  }
  if (::listen(listening.get(), kBacklog) != 0) {
    return Errno("cannot listen", path_);
  }
  socket_ = std::move(listening);
  return absl::OkStatus();
}

SocketPath::~SocketPath() {
  struct stat info;
  if (inode_ != 0 && ::lstat(path_.c_str(), &info) == 0 && info.st_ino == inode_) {
    ::unlink(path_.c_str());
  }
  socket_.reset();
  // Still locked: another opener finds, once it gets the lock, that the name is gone, and opens anew.
  if (lock_.valid()) {
    ::unlink(absl::StrCat(path_, ".lock").c_str());
  }
}

}  // namespace shardd
