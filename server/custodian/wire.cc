#include "server/custodian/wire.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/shm/fd_channel_internal.h"

namespace shardd {
namespace {

void Set(char* to, size_t size, absl::string_view value) {
  const size_t length = std::min(value.size(), size - 1);
  if (length > 0) std::memcpy(to, value.data(), length);  // an empty view may have no data
  std::memset(to + length, 0, size - length);
}

absl::Status Await(int socket, short events, absl::Duration limit) {
  pollfd polled{socket, events, 0};
  int ready;
  do {
    ready = poll(&polled, 1, static_cast<int>(absl::ToInt64Milliseconds(limit)));
  } while (ready < 0 && errno == EINTR);
  if (ready > 0) return absl::OkStatus();
  return ready == 0 ? absl::DeadlineExceededError(absl::StrCat("no answer within ", absl::FormatDuration(limit)))
                    : absl::InternalError(absl::StrCat("poll: ", std::strerror(errno)));
}

}  // namespace

void CustodyMessage::SetName(absl::string_view value) { Set(name, sizeof(name), value); }
void CustodyMessage::SetText(absl::string_view value) { Set(text, sizeof(text), value); }

bool IsCustodyName(absl::string_view name) {
  return !name.empty() && name.size() < sizeof(CustodyMessage::name) &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return absl::ascii_islower(static_cast<unsigned char>(c)) ||
                  absl::ascii_isdigit(static_cast<unsigned char>(c)) || c == ' ' || c == '-';
         });
}

absl::Status SendCustody(int socket, const CustodyMessage& message, int fd, absl::Duration limit) {
  CustodyMessage copy = message;
  iovec buffer{&copy, sizeof(copy)};
  ssize_t sent = shm_internal::SendWithDescriptors(socket, &buffer, 1, &fd, fd < 0 ? 0 : 1);
  if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    if (absl::Status ready = Await(socket, POLLOUT, limit); !ready.ok()) return ready;
    sent = shm_internal::SendWithDescriptors(socket, &buffer, 1, &fd, fd < 0 ? 0 : 1);
  }
  return sent == sizeof(copy) ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("send: ", std::strerror(errno)));
}

absl::StatusOr<CustodyMessage> ReceiveCustody(int socket, UniqueFd* fd, absl::Duration limit) {
  if (absl::Status ready = Await(socket, POLLIN, limit); !ready.ok()) return ready;
  CustodyMessage result;
  iovec buffer{&result, sizeof(result)};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
  msghdr message{};
  message.msg_iov = &buffer;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t received;
  do {
    received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (received < 0 && errno == EINTR);
  if (received <= 0) {
    return absl::UnavailableError(received == 0 ? "the other side has closed the connection"
                                                : absl::StrCat("receive: ", std::strerror(errno)));
  }
  std::vector<UniqueFd> fds = shm_internal::TakeDescriptors(message);
  if ((message.msg_flags & MSG_CTRUNC) != 0 && fds.empty()) {
    return absl::ResourceExhaustedError("a descriptor was lost, because this process has too many open files");
  }
  const CustodyMessage want;
  const bool is_ours = received == sizeof(result) && std::memcmp(result.magic, want.magic, sizeof(want.magic)) == 0 &&
                       (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0 && fds.size() <= 1;
  if (!is_ours) {
    return absl::InvalidArgumentError(
        absl::StrCat("no message of custody (got ", received, " bytes, want ", sizeof(result), ")"));
  }
  result.name[sizeof(result.name) - 1] = result.text[sizeof(result.text) - 1] = 0;
  if (!fds.empty()) *fd = std::move(fds.front());
  return result;
}

}  // namespace shardd
