#include "server/service/peer_registry.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace shardd {
namespace {

struct Pair {
  Pair() {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    near.reset(fds[0]);
    far.reset(fds[1]);
  }
  std::string peer() const { return absl::StrCat("fd:", near.get()); }
  UniqueFd near;
  UniqueFd far;
};

TEST(PeerRegistryTest, OpenConnectionIsFoundWithItsCredentials) {
  PeerRegistry registry;
  const Pair pair;
  ASSERT_TRUE(registry.Register(pair.near.get(), {.uid = 7, .gid = 8, .pid = 9}, UniqueFd()).ok());
  const auto found = registry.Lookup(pair.peer());
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->uid, 7u);
  EXPECT_EQ(found->gid, 8u);
  EXPECT_EQ(found->pid, 9);
  EXPECT_FALSE(registry.DupPidfd(pair.peer()).valid());
}

TEST(PeerRegistryTest, OtherPeersAreUnauthenticated) {
  const PeerRegistry registry;
  for (const char* peer : {"", "unix:", "fd:", "fd:8", "fd:-1", "fd:8x", "ipv4:127.0.0.1:80", "fd:99999999999999"}) {
    EXPECT_EQ(registry.Lookup(peer).status().code(), absl::StatusCode::kUnauthenticated) << peer;
  }
}

TEST(PeerRegistryTest, ReusedNumberIsNotTheOldPeer) {
  PeerRegistry registry;
  Pair pair;
  const std::string peer = pair.peer();
  const int number = pair.near.get();
  ASSERT_TRUE(registry.Register(number, {.uid = 7}, UniqueFd()).ok());
  const Pair other;
  ASSERT_EQ(::dup2(other.near.get(), number), number);
  EXPECT_EQ(registry.Lookup(peer).status().code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(registry.Sweep(), 0u);
}

TEST(PeerRegistryTest, SweepKeepsOpenConnectionsAndReleasesPidfds) {
  PeerRegistry registry;
  Pair closed;
  const Pair open;
  UniqueFd pidfd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const int pidfd_number = pidfd.get();
  ASSERT_TRUE(registry.Register(closed.near.get(), {.uid = 7}, std::move(pidfd)).ok());
  ASSERT_TRUE(registry.Register(open.near.get(), {.uid = 7}, UniqueFd()).ok());
  EXPECT_TRUE(registry.DupPidfd(closed.peer()).valid());
  EXPECT_EQ(registry.CountOfUid(7), 2u);
  closed.near.reset();
  EXPECT_EQ(registry.Sweep(), 1u);
  EXPECT_EQ(registry.CountOfUid(7), 1u);
  EXPECT_EQ(::fcntl(pidfd_number, F_GETFD), -1);
  EXPECT_TRUE(registry.Lookup(open.peer()).ok());
}

TEST(PeerRegistryTest, TheGroupMaySeeAllFromTheDaemonsNamespacesAlone) {
  PeerRegistry registry;
  const Pair member;
  const Pair stranger;
  const Pair elsewhere;
  const PeerCredentials here{.uid = 12345, .gid = 12345, .pid = ::getpid()};
  ASSERT_TRUE(registry.Register(member.near.get(), here, UniqueFd(), /*in_view_group=*/true).ok());
  ASSERT_TRUE(registry.Register(stranger.near.get(), here, UniqueFd()).ok());
  // A PID that is not to be seen here: it is of another namespace.
  ASSERT_TRUE(registry.Register(elsewhere.near.get(), {.uid = 12345, .pid = 0}, UniqueFd(), true).ok());
  EXPECT_TRUE(registry.MayView(member.peer()));
  EXPECT_FALSE(registry.MayView(stranger.peer()));
  EXPECT_FALSE(registry.MayView(elsewhere.peer()));
  EXPECT_FALSE(registry.MayView("fd:99999"));
}

TEST(PeerRegistryTest, WhatIsNoSocketIsNotRegistered) {
  PeerRegistry registry;
  const UniqueFd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(registry.Register(file.get(), {}, UniqueFd()).code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace shardd
