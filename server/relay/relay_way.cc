#include "server/relay/relay_way.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace shardd {
bool RelayWay::Fill() {
  if (eof || !readable) {
    return false;
  }
  if (buffer == nullptr) {
    buffer = std::make_unique_for_overwrite<char[]>(buffer_size_bytes);
  }
  const ssize_t bytes = ::recv(from, buffer.get(), buffer_size_bytes, MSG_DONTWAIT);
  if (bytes > 0) {
    begin = 0;
    end = discard ? 0 : static_cast<size_t>(bytes);
    return true;
  }
  if (bytes < 0 && errno == EINTR) {
    return true;
  }
  readable = false;
  eof = bytes == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
  return false;
}

bool RelayWay::Send(size_t most_bytes, size_t* sent) {
  *sent = 0;
  if (!writable && !discard) {
    return false;
  }
  const ssize_t bytes = discard ? -1 : ::send(to, buffer.get() + begin, most_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (bytes >= 0) {
    *sent = static_cast<size_t>(bytes);
    begin += *sent;
    return true;
  }
  if (!discard && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    writable = false;
    return false;
  }
  if (!discard && errno == EINTR) {
    return true;
  }
  discard = true;  // the other direction is still relayed
  *sent = end - begin;
  begin = end;
  return true;
}

void RelayWay::Say(absl::string_view bytes) {
  if (buffer == nullptr) {
    buffer = std::make_unique_for_overwrite<char[]>(buffer_size_bytes);
  }
  const size_t size_bytes = std::min(bytes.size(), buffer_size_bytes - end);
  std::memcpy(buffer.get() + end, bytes.data(), size_bytes);
  end += size_bytes;
}

void RelayWay::FreeBufferIfEmpty() {
  if (empty()) {
    buffer = nullptr;
    begin = end = 0;
  }
}

}  // namespace shardd
