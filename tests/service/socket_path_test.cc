#include "common/shm/socket_path.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/service/service_fixture.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;
using testing_service::ConnectTo;
using testing_service::TempDir;

class SocketPathTest : public ::testing::Test {
 protected:
  static mode_t ModeOf(const std::string& path) {
    struct stat info = {};
    EXPECT_EQ(::lstat(path.c_str(), &info), 0) << path;
    return info.st_mode & 07777;
  }
  absl::Status BindStatus(const std::string& path) { return SocketPath::Bind(path).status(); }

  TempDir dir_;
};

TEST_F(SocketPathTest, DirectoryAndSocketAreForOwnerAndGroupOnly) {
  const mode_t before = ::umask(0);
  const auto bound = SocketPath::Bind(dir_.path() + "/run/s.sock");
  ::umask(before);
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_EQ(ModeOf(dir_.path() + "/run"), 0750u);
  EXPECT_EQ(ModeOf(dir_.path() + "/run/s.sock"), 0660u);
  EXPECT_EQ(ModeOf(dir_.path() + "/run/s.sock.lock"), 0600u);
}

TEST_F(SocketPathTest, SocketModeDoesNotDependOnUmask) {
  const mode_t before = ::umask(0177);
  const auto bound = SocketPath::Bind(dir_.path() + "/s.sock");
  ::umask(before);
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_EQ(ModeOf(dir_.path() + "/s.sock"), 0660u);
}

TEST_F(SocketPathTest, StaleSocketOfAKilledDaemonIsReused) {
  const std::string path = dir_.path() + "/s.sock";
  {
    const UniqueFd dead(::socket(AF_UNIX, SOCK_STREAM, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path.c_str());
    ASSERT_EQ(::bind(dead.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    const UniqueFd lock(::open((path + ".lock").c_str(), O_CREAT | O_RDWR, 0600));
    ASSERT_EQ(::write(lock.get(), "99999\n", 6), 6);
  }
  const auto bound = SocketPath::Bind(path);
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_TRUE(ConnectTo(path).valid());
}

TEST_F(SocketPathTest, SomethingThatIsNoSocketIsLeftAlone) {
  const std::string path = dir_.path() + "/s.sock";
  { const UniqueFd file(::open(path.c_str(), O_CREAT | O_RDWR, 0644)); }
  const absl::Status status = BindStatus(path);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no socket"));
  EXPECT_EQ(::access(path.c_str(), F_OK), 0);
}

TEST_F(SocketPathTest, DirectoryWritableForOthersIsRefused) {
  ASSERT_EQ(::chmod(dir_.path().c_str(), 0777), 0);
  EXPECT_EQ(BindStatus(dir_.path() + "/s.sock").code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_EQ(::chmod(dir_.path().c_str(), 01777), 0);
  EXPECT_TRUE(BindStatus(dir_.path() + "/s.sock").ok()) << "sticky, as /tmp is";
}

TEST_F(SocketPathTest, DirectoryOfAnotherUserIsRefusedAlsoBehindALink) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs root to give a directory away";
  }
  const std::string foreign = dir_.path() + "/foreign";
  ASSERT_EQ(::mkdir(foreign.c_str(), 0755), 0);
  ASSERT_EQ(::chown(foreign.c_str(), 12345, 12345), 0);
  const absl::Status status = BindStatus(foreign + "/s.sock");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("got uid 12345"));

  const std::string link = dir_.path() + "/link";
  ASSERT_EQ(::symlink(dir_.path().c_str(), link.c_str()), 0);
  ASSERT_EQ(::lchown(link.c_str(), 12345, 12345), 0);
  EXPECT_EQ(BindStatus(link + "/s.sock").code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(SocketPathTest, PathThatIsTooLongIsNamedWithItsLimit) {
  const absl::Status status = BindStatus(dir_.path() + "/" + std::string(120, 'x'));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("want 1 to 107"));
}

}  // namespace
}  // namespace shardd
