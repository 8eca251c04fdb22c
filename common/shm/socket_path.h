#ifndef SHARDD_COMMON_SHM_SOCKET_PATH_H_
#define SHARDD_COMMON_SHM_SOCKET_PATH_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/shm/unique_fd.h"

namespace shardd {

// A listening Unix socket at a path that no other daemon can take while this object lives. A second bind would steal
// the path silently, so whoever binds must have a flock on "<path>.lock". Thread-compatible.
class SocketPath {
 public:
  // Errors as Listener::Create. The socket is non-blocking, CLOEXEC and has `mode`.
  static absl::StatusOr<std::unique_ptr<SocketPath>> Bind(const std::string& path, int type = SOCK_STREAM,
                                                          mode_t mode = 0660);
  // Removes socket and lock file if they are still this object's.
  ~SocketPath();
  SocketPath(const SocketPath&) = delete;
  SocketPath& operator=(const SocketPath&) = delete;

  int fd() const { return socket_.get(); }
  const std::string& path() const { return path_; }

 private:
  SocketPath(std::string path, UniqueFd lock) : path_(std::move(path)), lock_(std::move(lock)) {}
  absl::Status BindAndListen(int type, mode_t mode);

  const std::string path_;
  UniqueFd lock_;
  UniqueFd socket_;
  uint64_t inode_ = 0;  // of the path, not the socket
};

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_SOCKET_PATH_H_
