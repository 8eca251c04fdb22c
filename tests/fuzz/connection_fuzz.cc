// What a connection says first: a request of the fd channel, or HTTP/2 frames, whole and in pieces.

#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/shm/fd_channel.h"
#include "server/job/writes/passes.h"
#include "server/relay/http2_meter.h"
#include "tests/fuzz/require.h"

namespace shardd {
namespace {

void CheckFdRequest(absl::string_view bytes) {
  int pair[2] = {-1, -1};
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
  const UniqueFd client(pair[0]), daemon(pair[1]);
  (void)!::send(client.get(), bytes.data(), std::min<size_t>(bytes.size(), 4096), MSG_NOSIGNAL | MSG_DONTWAIT);
  ::shutdown(client.get(), SHUT_WR);
  const absl::StatusOr<FdRequest> request = ReadFdRequest(daemon.get());
  if (request.ok()) {
    REQUIRE(request->token.size() == kTokenBytes);
    REQUIRE(request->range.count >= 1 && request->range.count <= kMaxFdsAtOnce);
    REQUIRE(!request->pidfd.valid());
  } else {
    REQUIRE(absl::IsInvalidArgument(request.status()));
  }
}

void CheckFrames(absl::string_view bytes, size_t piece) {
  Http2Meter whole, pieces, poor;
  const Http2Meter::Passed at_once = whole.Pass(bytes, absl::InfiniteDuration());
  REQUIRE(at_once.size_bytes == bytes.size());
  absl::Duration price, dear;
  for (size_t at = 0; at < bytes.size();) {
    const Http2Meter::Passed passed = pieces.Pass(bytes.substr(at, piece), absl::InfiniteDuration());
    REQUIRE(passed.size_bytes == std::min(piece, bytes.size() - at));
    at += passed.size_bytes;
    price += passed.price;
  }
  for (size_t at = 0; at < bytes.size();) {
    const Http2Meter::Passed passed = poor.Pass(bytes.substr(at), absl::Nanoseconds(1));
    REQUIRE(passed.size_bytes > 0);
    at += passed.size_bytes;
    dear += passed.price;
  }
  REQUIRE(price == at_once.price && dear == at_once.price);
  REQUIRE(whole.last_stream() == pieces.last_stream() && whole.last_stream() == poor.last_stream());
}

}  // namespace
}  // namespace shardd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const absl::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  shardd::CheckFdRequest(bytes);
  shardd::CheckFrames(bytes, 1 + data[0] % 64);
  return 0;
}
