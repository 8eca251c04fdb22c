#include "server/observe/notify.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/shm/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardd {
namespace {

class NotifyTest : public ::testing::Test {
 protected:
  void TearDown() override {
    unsetenv("NOTIFY_SOCKET");
    unlink(path_.c_str());
  }
  // Stands in for the service manager: receives at `name` ('@' stands for the zero of an abstract name).
  void ReceiveAt(const std::string& name) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, name.data(), name.size());
    if (name[0] == '@') address.sun_path[0] = '\0';
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
    socket_.reset(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    ASSERT_EQ(bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), length), 0) << std::strerror(errno);
    setenv("NOTIFY_SOCKET", name.c_str(), 1);
  }
  std::string Received() {
    char text[256];
    const ssize_t got = recv(socket_.get(), text, sizeof(text), 0);
    return got < 0 ? "" : std::string(text, static_cast<size_t>(got));
  }
  const std::string path_ = absl::StrCat("/tmp/shardd-notify-test.", getpid());
  UniqueFd socket_;
};

TEST_F(NotifyTest, StateReachesTheSocketOfAPath) {
  ReceiveAt(path_);
  EXPECT_TRUE(NotifyServiceManager("READY=1\nSTATUS=listens").ok());
  EXPECT_EQ(Received(), "READY=1\nSTATUS=listens");
}

TEST_F(NotifyTest, StateReachesAnAbstractSocket) {
  ReceiveAt(absl::StrCat("@shardd-notify-test.", getpid()));
  EXPECT_TRUE(NotifyServiceManager("STOPPING=1").ok());
  EXPECT_EQ(Received(), "STOPPING=1");
}

TEST_F(NotifyTest, WithoutAServiceManagerNothingIsSent) {
  unsetenv("NOTIFY_SOCKET");
  EXPECT_TRUE(NotifyServiceManager("READY=1").ok());
  setenv("NOTIFY_SOCKET", "", 1);
  EXPECT_TRUE(NotifyServiceManager("READY=1").ok());
}

TEST_F(NotifyTest, AbsentReceiverAndOtherAddressesAreErrors) {
  setenv("NOTIFY_SOCKET", path_.c_str(), 1);
  EXPECT_EQ(NotifyServiceManager("READY=1").code(), absl::StatusCode::kUnavailable);
  for (const std::string& name : {std::string("vsock:2:1234"), "/" + std::string(200, 'x')}) {
    setenv("NOTIFY_SOCKET", name.c_str(), 1);
    EXPECT_EQ(NotifyServiceManager("READY=1").code(), absl::StatusCode::kInvalidArgument) << name;
  }
}

}  // namespace
}  // namespace shardd
