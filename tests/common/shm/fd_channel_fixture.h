#ifndef SHARDD_TESTS_COMMON_SHM_FD_CHANNEL_FIXTURE_H_
#define SHARDD_TESTS_COMMON_SHM_FD_CHANNEL_FIXTURE_H_

// A daemon's listening socket on a real path, in the process of the test; clients are forked.

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <string>
#include <vector>

#include "common/shm/fd_channel.h"
#include "common/shm/fd_channel_internal.h"
#include "common/versions/versions.h"
#include "tests/common/shm/process_util.h"

namespace shardd {

inline UniqueFd Eventfd() { return UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); }

class FdChannelTest : public ::testing::Test {
 protected:
  // Binary on purpose, a zero byte inside.
  const std::string token_ = std::string("tok\0en\xff", 7) + "0123456789abcdef"[0] + "12345678";

  void SetUp() override {
    ASSERT_EQ(token_.size(), static_cast<size_t>(kTokenBytes));
    listener_.reset(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_un address = Address();
    ASSERT_EQ(bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(listen(listener_.get(), 8), 0);
  }
  std::string path() const { return dir_.File("shardd.sock"); }
  sockaddr_un Address() const {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path().c_str());
    return address;
  }
  // The next client; invalid at the limit.
  UniqueFd Accept() {
    return testing::Readable(listener_.get()) ? UniqueFd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC))
                                              : UniqueFd();
  }
  absl::StatusOr<FdRequest> ReadRequest(int socket) {
    if (!testing::Readable(socket)) {
      return absl::DeadlineExceededError("no request");
    }
    return ReadFdRequest(socket);
  }
  absl::StatusOr<std::vector<UniqueFd>> Fetch(absl::Duration timeout = testing::kLimit) const {
    return FetchSessionFds(path(), 42, token_, timeout);
  }
  // A client that speaks bytes of its own choice.
  UniqueFd ConnectRaw() const {
    UniqueFd raw(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_un address = Address();
    if (connect(raw.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      raw.reset();
    }
    return raw;
  }
  shm_internal::RequestWire Request() const {
    shm_internal::RequestWire wire{};
    std::memcpy(wire.magic, shm_internal::kFdMagic, 4);
    wire.protocol_version = kProtocolVersions.newest;
    wire.session_id = 42;
    std::memcpy(wire.token, token_.data(), kTokenBytes);
    return wire;
  }
  static ssize_t SendRaw(int socket, const void* bytes, size_t size_bytes, const std::vector<int>& fds = {}) {
    iovec buffer = {.iov_base = const_cast<void*>(bytes), .iov_len = size_bytes};
    return shm_internal::SendWithDescriptors(socket, &buffer, 1, fds.data(), fds.size());
  }
  // What the daemon makes of a client that sends these bytes (and closes, where nothing else is to be read).
  absl::StatusOr<FdRequest> Serve(const std::string& bytes, const std::vector<int>& fds = {}) {
    UniqueFd client = ConnectRaw();
    UniqueFd served = Accept();
    if (!bytes.empty()) {
      EXPECT_EQ(SendRaw(client.get(), bytes.data(), bytes.size(), fds), static_cast<ssize_t>(bytes.size()));
    }
    client.reset();
    return ReadRequest(served.get());
  }
  std::string RequestBytes() const {
    const shm_internal::RequestWire wire = Request();
    return std::string(reinterpret_cast<const char*>(&wire), sizeof(wire));
  }

  testing::TempDir dir_;
  UniqueFd listener_;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_COMMON_SHM_FD_CHANNEL_FIXTURE_H_
