// The relay between a client and gRPC: whatever the client sends, gRPC gets the same bytes in the same order, the
// client gets gRPC's, and both hear of each other's end. A refused client gets settings and at most one answer.

#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "server/relay/http2_refusal.h"
#include "server/relay/relay.h"
#include "tests/fuzz/require.h"

namespace shardd {
namespace {

constexpr int kLimitS = 60;        // of a machine without time; whoever hangs is ended by libFuzzer's -timeout before
constexpr size_t kMostPoor = 512;  // a poor client waits about a millisecond for each frame
constexpr size_t kMostBytes = 65536;  // the sockets take them all at once: the fuzzer has one thread
constexpr size_t kMostPieces = 100;   // of which each takes a kilobyte of a socket's memory, however small it is

struct Ends {
  UniqueFd ours, relays;
};

Ends Connect() {
  int pair[2] = {-1, -1};
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
  const timeval limit = {kLimitS, 0};
  REQUIRE(::setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) == 0);
  REQUIRE(::setsockopt(pair[0], SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) == 0);
  return {UniqueFd(pair[0]), UniqueFd(pair[1])};  // the relay never blocks on its own: MSG_DONTWAIT
}

// False: the relay has closed.
bool Send(int fd, absl::string_view bytes, size_t piece) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd, bytes.data(), std::min(piece, bytes.size()), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;  // libFuzzer's clock; a socket with a limit does not restart
    if (sent < 0) {
      REQUIRE(errno == EPIPE || errno == ECONNRESET);
      return false;
    }
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

// All bytes until the end, which comes within the limit.
std::string ReadAll(int fd) {
  std::string all;
  char buffer[4096];
  while (true) {
    const ssize_t bytes = ::recv(fd, buffer, sizeof(buffer), 0);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes <= 0) {
      REQUIRE(bytes == 0 || errno == ECONNRESET);
      return all;
    }
    all.append(buffer, static_cast<size_t>(bytes));
  }
}

std::unique_ptr<Relay> MakeRelay(double rate, absl::Duration burst) {
  RelayOptions options;
  options.connection_rate = options.uid_rate = rate;
  options.connection_burst = options.uid_burst = burst;
  options.first_call_timeout = options.refusal_timeout = absl::Hours(1);  // as kLimitS
  absl::StatusOr<std::unique_ptr<Relay>> relay = Relay::Create(options);
  REQUIRE(relay.ok());
  return *std::move(relay);
}

void CheckRelayed(Relay& relay, absl::string_view bytes, size_t piece, bool stays) {
  Ends client = Connect(), grpc = Connect();
  relay.Add(std::move(client.relays), std::move(grpc.relays), /*uid=*/7);
  const absl::string_view answer = bytes.substr(0, bytes.size() / 2);
  REQUIRE(Send(grpc.ours.get(), answer, piece));
  REQUIRE(Send(client.ours.get(), bytes, piece));
  if (!stays) {
    client.ours.reset();
    const std::string got = ReadAll(grpc.ours.get());
    REQUIRE(bytes.substr(0, got.size()) == got);  // nobody waits for the rest of a flood
    return;
  }
  ::shutdown(client.ours.get(), SHUT_WR);
  REQUIRE(ReadAll(grpc.ours.get()) == bytes);
  grpc.ours.reset();
  REQUIRE(ReadAll(client.ours.get()) == answer);
}

void CheckRefused(Relay& relay, absl::string_view bytes, size_t piece) {
  static const absl::Status status = absl::ResourceExhaustedError("attach: out of descriptors");
  Ends client = Connect();
  relay.Refuse(std::move(client.relays), status);
  if (Send(client.ours.get(), bytes, piece)) {
    ::shutdown(client.ours.get(), SHUT_WR);
  }
  const std::string got = ReadAll(client.ours.get());
  const std::string settings = http2::ServerSettings(), headers = http2::RefusalHeaders(status);
  if (got.empty()) return;  // reset before it was read
  REQUIRE(absl::string_view(got).substr(0, settings.size()) == settings);
  if (got.size() == settings.size()) return;
  REQUIRE(got.size() == settings.size() + http2::RefusalOf(1, headers).size());
  REQUIRE(absl::string_view(got).substr(got.size() - headers.size()) == headers);
}

}  // namespace
}  // namespace shardd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using shardd::MakeRelay;
  static shardd::Relay& rich = *MakeRelay(1e6, absl::Hours(1)).release();
  static shardd::Relay& poor = *MakeRelay(1, absl::Microseconds(200)).release();
  if (size < 2) return 0;
  const absl::string_view bytes(reinterpret_cast<const char*>(data) + 2, std::min(size - 2, shardd::kMostBytes));
  const size_t least = bytes.size() / shardd::kMostPieces + 1;
  const size_t piece = data[1] % 8 == 0 ? std::max<size_t>(1 + data[1] / 8, least) : shardd::kMostBytes;
  shardd::Relay& of = data[0] % 16 == 0 && bytes.size() <= shardd::kMostPoor ? poor : rich;
  if ((data[0] & 64) != 0) {
    shardd::CheckRefused(of, bytes, piece);
  } else {
    shardd::CheckRelayed(of, bytes, piece, /*stays=*/(data[0] & 128) == 0);
  }
  return 0;
}
