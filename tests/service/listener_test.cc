#include "server/service/listener.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/shm/fd_channel.h"
#include "common/shm/fd_channel_internal.h"
#include "common/versions/versions.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/service/service_fixture.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;
using testing_service::ConnectTo;
using testing_service::Eventually;
using testing_service::IsClosedWithin;
using testing_service::kPatience;
using testing_service::RunAsUid;
using testing_service::SendBytes;
using testing_service::ServiceTest;
using testing_service::TempDir;

const std::string kToken(kTokenBytes, 't');

std::vector<int> Repeat(int fd) { return std::vector<int>(kSessionFdCount, fd); }

class ListenerTest : public ServiceTest {
 protected:
  // Answers every fd request with memory that holds `text`.
  void AnswerWithMemory(const std::string& text) {
    handler_ = [text](FdRequest, PeerCredentials, FdReply reply) {
      const UniqueFd memory(::memfd_create("test", MFD_CLOEXEC));
      ASSERT_EQ(::write(memory.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
      reply(absl::OkStatus(), Repeat(memory.get()));
    };
  }

  // The answer to an fd request is the test's.
  struct HeldReply {
    absl::Notification asked;
    std::optional<FdReply> reply;
  };
  void HoldReply(HeldReply* held) {
    handler_ = [held](FdRequest, PeerCredentials, FdReply reply) {
      held->reply = std::move(reply);
      held->asked.Notify();
    };
  }

  absl::Status Fetch() { return FetchSessionFds(path(), 7, kToken, kPatience).status(); }
  // A client of the fd channel that sends its request and no more.
  UniqueFd AskAndDoNotRead() {
    shm_internal::RequestWire request = {};
    std::memcpy(request.magic, shm_internal::kFdMagic, sizeof(request.magic));
    request.protocol_version = kProtocolVersions.newest;
    UniqueFd socket = ConnectTo(path());
    SendBytes(socket.get(), absl::string_view(reinterpret_cast<const char*>(&request), sizeof(request)));
    return socket;
  }
  static bool HasAnswer(int socket) {
    char byte = 0;
    return Eventually([&] { return ::recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 1; });
  }
  absl::Status Call() {
    v1::Daemon daemon;
    auto context = Context();
    const grpc::Status status = Jobs()->GetDaemon(context.get(), {}, &daemon);
    return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  }
};

TEST_F(ListenerTest, GrpcAndFdChannelShareOnePath) {
  AnswerWithMemory("hello");
  source_.daemon.set_version("1.2.3");
  Start();

  auto context = Context();
  v1::Daemon daemon;
  const grpc::Status status = Jobs()->GetDaemon(context.get(), {}, &daemon);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(daemon.version(), "1.2.3");

  const auto fds = FetchSessionFds(path(), 7, kToken, kPatience);
  ASSERT_TRUE(fds.ok()) << fds.status();
  char text[6] = {};
  ASSERT_EQ(::pread(fds->front().get(), text, 5, 0), 5);
  EXPECT_STREQ(text, "hello");
}

TEST_F(ListenerTest, HandlerSeesRequestCredentialsAndALivePidfd) {
  struct Seen {
    uint64_t session_id;
    std::string token;
    PeerCredentials peer;
    bool pidfd_is_of_a_live_process;
  };
  std::optional<Seen> seen;
  handler_ = [&seen](FdRequest request, PeerCredentials peer, FdReply reply) {
    pollfd poll = {request.pidfd.get(), POLLIN, 0};
    seen = Seen{request.session_id, request.token, peer, request.pidfd.valid() && ::poll(&poll, 1, 0) == 0};
    reply(absl::OkStatus(), Repeat(STDERR_FILENO));
  };
  Start();
  ASSERT_TRUE(Fetch().ok());
  ASSERT_TRUE(seen.has_value());
  EXPECT_EQ(seen->session_id, 7u);
  EXPECT_EQ(seen->token, kToken);
  EXPECT_EQ(seen->peer.uid, ::geteuid());
  EXPECT_EQ(seen->peer.gid, ::getegid());
  EXPECT_EQ(seen->peer.pid, ::getpid());
  EXPECT_TRUE(seen->pidfd_is_of_a_live_process);
}

TEST_F(ListenerTest, CredentialsAreThoseOfTheConnectingUid) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs root to connect as another uid";
  }
  uint32_t seen_uid = 0;
  handler_ = [&seen_uid](FdRequest, PeerCredentials peer, FdReply reply) {
    seen_uid = peer.uid;
    reply(absl::PermissionDeniedError("not yours"));
  };
  Start();
  LetOthersIn();
  absl::Status status;
  RunAsUid(12345, [&] { status = Fetch(); });
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
  EXPECT_EQ(seen_uid, 12345u);
}

TEST_F(ListenerTest, ReplyMayComeLaterFromAnotherThread) {
  HeldReply held;
  HoldReply(&held);
  Start();
  std::thread core([&] {
    held.asked.WaitForNotification();
    EXPECT_EQ(listener_->pending(), 1u);
    (*held.reply)(absl::OkStatus(), Repeat(STDERR_FILENO));
    held.reply.reset();
  });
  EXPECT_TRUE(Fetch().ok());
  core.join();
  EXPECT_TRUE(Eventually([&] { return listener_->pending() == 0; }));
}

TEST_F(ListenerTest, ReplyOutlivesTheListener) {
  HeldReply held;
  HoldReply(&held);
  Start();
  std::thread core([&] {
    held.asked.WaitForNotification();
    listener_.reset();
    (*held.reply)(absl::AbortedError("gone"));
  });
  EXPECT_EQ(Fetch().code(), absl::StatusCode::kAborted);
  core.join();
}

TEST_F(ListenerTest, DroppedReplyAnswersUnavailable) {
  handler_ = [](FdRequest, PeerCredentials, FdReply) {};
  Start();
  EXPECT_EQ(Fetch().code(), absl::StatusCode::kUnavailable);
}

TEST_F(ListenerTest, OnlyTheFirstOfTwoAnswersIsSent) {
  handler_ = [](FdRequest, PeerCredentials, FdReply reply) {
    const FdReply copy = reply;
    copy(absl::NotFoundError("first"));
    reply(absl::OkStatus(), Repeat(STDERR_FILENO));
  };
  Start();
  EXPECT_EQ(Fetch().code(), absl::StatusCode::kNotFound);
}

TEST_F(ListenerTest, SilentConnectionIsDroppedAndOthersAreServedMeanwhile) {
  AnswerWithMemory("x");
  Start({.first_byte_timeout = absl::Milliseconds(300)});
  const absl::Time start = absl::Now();
  const UniqueFd silent = ConnectTo(path());
  EXPECT_TRUE(Fetch().ok());
  EXPECT_TRUE(Call().ok());
  EXPECT_TRUE(IsClosedWithin(silent.get(), kPatience));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(300));
  EXPECT_TRUE(Eventually([&] { return listener_->pending() == 0; }));
}

TEST_F(ListenerTest, GarbageIsClosedAtOnceAndOthersAreServed) {
  AnswerWithMemory("x");
  Start({.first_byte_timeout = absl::InfiniteDuration()});
  std::mt19937 random(20261121);
  for (int round = 0; round < 200; ++round) {
    std::string bytes(1 + random() % 200, '\0');
    for (char& c : bytes) {
      c = static_cast<char>(random());
    }
    // gRPC waits for the rest of its preface, for a while: its own business.
    if (bytes[0] == 'P') {
      bytes[0] = 'Q';
    }
    const UniqueFd socket = ConnectTo(path());
    SendBytes(socket.get(), bytes);
    ASSERT_TRUE(IsClosedWithin(socket.get(), kPatience)) << "round " << round;
  }
  EXPECT_TRUE(Fetch().ok());
  EXPECT_TRUE(Call().ok());
}

TEST_F(ListenerTest, MalformedFdRequestsAreClosed) {
  Start({.first_byte_timeout = absl::InfiniteDuration()});
  const std::vector<std::string> requests = {"S", "SHFD", "SXYZ" + std::string(36, '\0'),
                                             "SHFD" + std::string(4000, '\xff')};
  for (const std::string& request : requests) {
    const UniqueFd socket = ConnectTo(path());
    SendBytes(socket.get(), request);
    EXPECT_TRUE(IsClosedWithin(socket.get(), kPatience)) << request.size() << " bytes";
  }
}

TEST_F(ListenerTest, PendingConnectionsOfOneUidAreBounded) {
  AnswerWithMemory("x");
  Start({.first_byte_timeout = absl::InfiniteDuration(), .max_pending_per_uid = 4});
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 4; ++i) {
    silent.push_back(ConnectTo(path()));
  }
  ASSERT_TRUE(Eventually([&] { return listener_->pending() == 4; }));
  const UniqueFd fifth = ConnectTo(path());
  EXPECT_TRUE(IsClosedWithin(fifth.get(), kPatience));
  silent.pop_back();
  ASSERT_TRUE(Eventually([&] { return listener_->pending() == 3; }));
  EXPECT_TRUE(Fetch().ok());
}

TEST_F(ListenerTest, PendingConnectionsOfAllUidsAreBounded) {
  Start({.first_byte_timeout = absl::InfiniteDuration(), .max_pending = 2});
  const UniqueFd first = ConnectTo(path());
  const UniqueFd second = ConnectTo(path());
  ASSERT_TRUE(Eventually([&] { return listener_->pending() == 2; }));
  const UniqueFd third = ConnectTo(path());
  EXPECT_TRUE(IsClosedWithin(third.get(), kPatience));
}

// The kernel keeps descriptors that were sent open, on the daemon's account, until they are read.
TEST_F(ListenerTest, UnreadAnswersAreBoundedAndHoldUpNoConnection) {
  AnswerWithMemory("x");
  Start({.max_unread_per_uid = 4});
  std::vector<UniqueFd> lazy;
  for (int i = 0; i < 4; ++i) {
    lazy.push_back(AskAndDoNotRead());
    ASSERT_TRUE(HasAnswer(lazy.back().get()));
  }
  EXPECT_EQ(listener_->unread(), 4u);
  EXPECT_TRUE(Eventually([&] { return listener_->pending() == 0; }));
  EXPECT_EQ(Fetch().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Call().ok()) << "connections are not refused for it";
  if (::geteuid() == 0) {
    LetOthersIn();
    absl::Status other;
    RunAsUid(12345, [&] { other = Fetch(); });
    EXPECT_TRUE(other.ok()) << "another user's slots are its own: " << other;
  }
  ASSERT_TRUE(Eventually([&] { return listener_->unread() == 4; }));  // the other user's was read
  char byte = 0;
  EXPECT_EQ(::recv(lazy[0].get(), &byte, 1, MSG_PEEK), 1);
  EXPECT_EQ(listener_->unread(), 4u) << "looking at an answer is not reading it";
  EXPECT_TRUE(IsClosedWithin(lazy[0].get(), kPatience));  // reads all of it; its descriptors find no room and are gone
  EXPECT_TRUE(Eventually([&] { return listener_->unread() == 3; }));
  lazy[1].reset();
  EXPECT_TRUE(Eventually([&] { return listener_->unread() == 2; }));
  EXPECT_TRUE(Fetch().ok());
}

TEST_F(ListenerTest, UnreadRefusalsHoldNoSlot) {
  Start({.max_unread_per_uid = 1});
  const UniqueFd lazy = AskAndDoNotRead();
  ASSERT_TRUE(HasAnswer(lazy.get()));
  EXPECT_EQ(listener_->unread(), 0u);
}

TEST_F(ListenerTest, StopLeavesUnreadAnswersToTheirClients) {
  AnswerWithMemory("x");
  Start();
  const UniqueFd lazy = AskAndDoNotRead();
  ASSERT_TRUE(HasAnswer(lazy.get()));
  listener_->Stop();
  EXPECT_EQ(listener_->unread(), 0u);
  EXPECT_TRUE(HasAnswer(lazy.get()));
}

TEST_F(ListenerTest, GrpcConnectionsOfOneUidAreBounded) {
  Start({.max_connections_per_uid = 2});
  UniqueFd open[2];
  for (UniqueFd& socket : open) {
    socket = ConnectTo(path());
    SendBytes(socket.get(), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
  }
  ASSERT_TRUE(Eventually([&] { return registry_.CountOfUid(::geteuid()) == 2; }));
  const absl::Status third = Call();
  EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted) << third;
  EXPECT_THAT(third.message(), HasSubstr("too many gRPC connections of uid"));
  const UniqueFd silent = ConnectTo(path());
  SendBytes(silent.get(), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
  EXPECT_TRUE(IsClosedWithin(silent.get(), kPatience));
  open[0].reset();
  EXPECT_TRUE(Eventually([&] { return Call().ok(); })) << "a closed connection must not count";
}

TEST_F(ListenerTest, ClosedGrpcConnectionIsForgottenAndItsNumberRests) {
  Start();
  std::vector<std::string> peers;
  for (int i = 0; i < 3; ++i) {
    UniqueFd socket = ConnectTo(path());
    SendBytes(socket.get(), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    ASSERT_TRUE(Eventually([&] { return registry_.CountOfUid(::geteuid()) == 1; }));
    std::string found;
    for (int fd = 0; fd < 4096; ++fd) {
      if (registry_.Lookup(absl::StrCat("fd:", fd)).ok()) {
        found = absl::StrCat("fd:", fd);
      }
    }
    ASSERT_NE(found, "");
    EXPECT_THAT(peers, ::testing::Not(::testing::Contains(found)));
    peers.push_back(found);
    EXPECT_TRUE(registry_.DupPidfd(found).valid());
    socket.reset();
    ASSERT_TRUE(Eventually([&] { return registry_.Sweep() == 0; }));
    EXPECT_EQ(registry_.Lookup(found).status().code(), absl::StatusCode::kUnauthenticated);
  }
}

TEST_F(ListenerTest, ManyClientsConnectAtOnce) {
  AnswerWithMemory("x");
  Start();
  std::vector<std::thread> clients;
  for (int i = 0; i < 16; ++i) {
    clients.emplace_back([&, i] {
      for (int round = 0; round < 5; ++round) {
        const absl::Status status = i % 2 == 0 ? Fetch() : Call();
        EXPECT_TRUE(status.ok()) << status;
      }
    });
  }
  for (std::thread& client : clients) {
    client.join();
  }
}

TEST_F(ListenerTest, StopIsIdempotentAndLeavesNothing) {
  Start();
  EXPECT_EQ(::access(path().c_str(), F_OK), 0);
  listener_->Stop();
  listener_->Stop();
  EXPECT_NE(::access(path().c_str(), F_OK), 0);
  EXPECT_NE(::access((path() + ".lock").c_str(), F_OK), 0);
}

TEST_F(ListenerTest, StopClosesUndecidedConnections) {
  Start({.first_byte_timeout = absl::InfiniteDuration()});
  const UniqueFd silent = ConnectTo(path());
  ASSERT_TRUE(Eventually([&] { return listener_->pending() == 1; }));
  listener_->Stop();
  EXPECT_TRUE(IsClosedWithin(silent.get(), kPatience));
}

TEST_F(ListenerTest, SecondDaemonIsRefusedAndTheFirstServesOn) {
  Start();
  PeerRegistry other_registry;
  const auto second = Listener::Create(path(), server_->server(), &other_registry, handler_);
  ASSERT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(absl::StrCat("pid ", ::getpid())));
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(path() + ".lock"));
  EXPECT_TRUE(Call().ok());
}

TEST_F(ListenerTest, PathIsFreeAgainAfterStop) {
  Start();
  listener_->Stop();
  const auto second = Listener::Create(path(), server_->server(), &registry_, handler_);
  ASSERT_TRUE(second.ok()) << second.status();
  listener_ = nullptr;
  EXPECT_TRUE(Call().ok()) << "the first must not have removed the second's socket";
}

}  // namespace
}  // namespace shardd
