#ifndef SHARDD_COMMON_SHM_FD_CHANNEL_INTERNAL_H_
#define SHARDD_COMMON_SHM_FD_CHANNEL_INTERNAL_H_

// Private to common/shm and its tests: the bytes of the fd channel (layout: fd_channel.h), in native byte order because
// both ends are on one machine.

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/shm/fd_channel.h"

namespace shardd::shm_internal {

inline constexpr char kFdMagic[4] = {'S', 'H', 'F', 'D'};
inline constexpr size_t kMaxReplyTextBytes = 16384;
inline constexpr size_t kMaxDescriptors = kMaxFdsAtOnce;

struct RequestWire {
  char magic[4];
  uint32_t protocol_version;
  uint64_t session_id;
  char token[kTokenBytes];
  uint32_t first_descriptor;
  uint32_t descriptors;  // 0: kSessionFdCount
};
static_assert(sizeof(RequestWire) == 40);

struct ReplyWire {
  char magic[4];
  int32_t code;
  uint32_t text_bytes;
  uint32_t descriptors;
};
static_assert(sizeof(ReplyWire) == 16);

// Takes ownership of every descriptor in `message`.
std::vector<UniqueFd> TakeDescriptors(const msghdr& message);

// Sends all buffers with `fds` attached in one sendmsg. Returns the bytes sent, or -1 with errno.
ssize_t SendWithDescriptors(int socket, iovec* buffers, size_t count, const int* fds, size_t fd_count);

}  // namespace shardd::shm_internal

#endif  // SHARDD_COMMON_SHM_FD_CHANNEL_INTERNAL_H_
