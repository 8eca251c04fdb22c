#include "server/observe/notify.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/process/environment.h"
#include "common/shm/unique_fd.h"

namespace shardd {

absl::Status NotifyServiceManager(absl::string_view state) {
  const std::string name = Environment("NOTIFY_SOCKET");
  if (name.empty()) {
    return absl::OkStatus();
  }
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if ((name[0] != '/' && name[0] != '@') || name.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrCat("notify service manager: NOTIFY_SOCKET names no Unix socket (got \"", name, "\")"));
  }
  std::memcpy(address.sun_path, name.data(), name.size());
  socklen_t length = sizeof(address);  // a path ends with a zero, an abstract name with its last byte
  if (name[0] == '@') {
    address.sun_path[0] = '\0';
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
  }
  const UniqueFd sender(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!sender.valid() || ::sendto(sender.get(), state.data(), state.size(), MSG_NOSIGNAL,
                                  reinterpret_cast<const sockaddr*>(&address), length) < 0) {
    return absl::UnavailableError(absl::StrCat("notify service manager \"", name, "\": ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

}  // namespace shardd
