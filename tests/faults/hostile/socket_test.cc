// The daemon's socket: streams of sessions that are not the caller's, descriptors without a token, and noise.

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/shm/fd_channel.h"
#include "common/shm/fd_channel_internal.h"
#include "common/versions/versions.h"
#include "tests/faults/bad_input.h"
#include "tests/faults/commands.h"

namespace shardd::faults {
namespace {

using testing::PollUntil;

TEST_F(BadInput, ASessionBelongsToItsStreamAlone) {
  StartDaemonWithJob();
  {
    RawClient owner(socket());
    ASSERT_TRUE(owner.Enter(SpecOf(job_), 0).ok());
    const uint64_t aborts = Job().counters().aborts();
    RawClient stranger(socket());
    v1::SessionRequest detach;
    detach.mutable_detach();
    v1::SessionRequest command;
    command.mutable_commands()->add_commands()->mutable_step();
    {
      RawStream guess(stranger.stub());  // the session's number is easily guessed, its token is not
      guess.Hello(owner.session().session_id(), std::string(kTokenBytes, 'x'));
      guess.Write(detach);
      guess.Write(command);
      ExpectStatus(guess.End(), absl::StatusCode::kUnauthenticated, "wrong token");
    }
    {
      RawStream second(stranger.stub());
      second.Hello(owner.session().session_id(), owner.session().token());
      second.Write(detach);
      ExpectStatus(second.End(), absl::StatusCode::kAlreadyExists, "stream already");
    }
    {
      RawStream early(stranger.stub());
      early.Write(command);
      ExpectStatus(early.End(), absl::StatusCode::kFailedPrecondition, "hello");
    }
    {
      RawStream early(stranger.stub());
      early.Write(detach);
      ExpectStatus(early.End(), absl::StatusCode::kFailedPrecondition, "hello");
    }
    {
      RawStream unknown(stranger.stub());
      unknown.Hello(0, "");
      ExpectStatus(unknown.End(), absl::StatusCode::kUnauthenticated, "no such session");
    }
    EXPECT_EQ(Ranks()[0].session_id(), owner.session().session_id());
    EXPECT_EQ(Job().counters().aborts(), aborts);
    EXPECT_EQ(Ranks()[0].commands(), 0u);
    owner.Send(Record(Opcode::kUnshard, 0, v1::PHASE_FORWARD));
    EXPECT_TRUE(owner.Consumed());  // it still works
  }
  ExpectJobIntact();
}

TEST_F(BadInput, DescriptorsNeedTheTokenOfALiveSession) {
  StartDaemonWithJob();
  std::string stale_token;
  uint64_t stale_id = 0;
  {
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(SpecOf(job_), 0).ok());
    stale_id = client.session().session_id();
    stale_token = client.session().token();
    ExpectStatus(FetchSessionFds(socket(), stale_id, std::string(kTokenBytes, 'x'), testing::kLimit).status(),
                 absl::StatusCode::kPermissionDenied, "wrong token");
    ExpectStatus(FetchSessionFds(socket(), stale_id + 1, stale_token, testing::kLimit).status(),
                 absl::StatusCode::kPermissionDenied, "no such session");
    EXPECT_TRUE(FetchSessionFds(socket(), stale_id, stale_token, testing::kLimit).ok());
  }
  ASSERT_TRUE(PollUntil([&] { return Job().attached_ranks() == 0; }));
  ExpectStatus(FetchSessionFds(socket(), stale_id, stale_token, testing::kLimit).status(),
               absl::StatusCode::kPermissionDenied, "no such session");
  ExpectJobIntact();
}

// What was sent to it and is not read stays open in the kernel, for the daemon: 8 descriptors each, 1600 here.
TEST_F(BadInput, AClientThatReadsNoDescriptorsHoldsOnlyAFew) {
  StartDaemonWithJob();
  {
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(SpecOf(job_), 0).ok());
    shm_internal::RequestWire request = {};
    std::memcpy(request.magic, shm_internal::kFdMagic, sizeof(request.magic));
    request.protocol_version = kProtocolVersions.newest;
    request.session_id = client.session().session_id();
    std::memcpy(request.token, client.session().token().data(), kTokenBytes);
    std::vector<UniqueFd> lazy;
    int answers = 0, refused = 0;
    for (int i = 0; i < 200; ++i) {
      lazy.push_back(ConnectTo(socket()));
      const int fd = lazy.back().get();
      ASSERT_EQ(send(fd, &request, sizeof(request), MSG_NOSIGNAL), static_cast<ssize_t>(sizeof(request)));
      ASSERT_TRUE(testing::Readable(fd));
      shm_internal::ReplyWire reply = {};
      ASSERT_EQ(recv(fd, &reply, sizeof(reply), MSG_PEEK), static_cast<ssize_t>(sizeof(reply)));  // and not more
      if (reply.code == static_cast<int32_t>(absl::StatusCode::kResourceExhausted)) {
        EXPECT_EQ(reply.descriptors, 0u);
        ++refused;
      } else {
        EXPECT_EQ(reply.code, 0);
        ++answers;
      }
    }
    EXPECT_EQ(answers, 64);
    EXPECT_EQ(refused, 136);
    lazy.clear();
    EXPECT_TRUE(PollUntil([&] {
      return FetchSessionFds(socket(), client.session().session_id(), client.session().token(), testing::kLimit).ok();
    }));
  }
  ExpectJobIntact();
}

// As a client library of another version would ask: it is told so, whatever else is right.
TEST_F(BadInput, TheDescriptorChannelOfAnotherVersionIsToldSo) {
  StartDaemonWithJob();
  {
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(SpecOf(job_), 0).ok());
    const UniqueFd connected = ConnectTo(socket());
    ASSERT_TRUE(connected.valid());
    shm_internal::RequestWire request = {};
    std::memcpy(request.magic, shm_internal::kFdMagic, sizeof(request.magic));
    request.protocol_version = kProtocolVersions.newest + 1;
    request.session_id = client.session().session_id();
    std::memcpy(request.token, client.session().token().data(), kTokenBytes);
    ASSERT_EQ(send(connected.get(), &request, sizeof(request), MSG_NOSIGNAL), static_cast<ssize_t>(sizeof(request)));
    ASSERT_TRUE(testing::Readable(connected.get()));
    char answer[4096] = {};
    const ssize_t bytes = recv(connected.get(), answer, sizeof(answer), 0);
    ASSERT_GE(bytes, static_cast<ssize_t>(sizeof(shm_internal::ReplyWire)));
    shm_internal::ReplyWire reply;
    std::memcpy(&reply, answer, sizeof(reply));
    EXPECT_EQ(reply.code, static_cast<int>(absl::StatusCode::kFailedPrecondition));
    EXPECT_EQ(reply.descriptors, 0u);
    EXPECT_EQ(absl::string_view(answer + sizeof(reply), bytes - sizeof(reply)),
              absl::StrCat("fd channel: session ", request.session_id, ": another protocol version (got ",
                           kProtocolVersions.newest + 1, ", want ", kProtocolVersions.newest, ", as it was attached)"));
    EXPECT_EQ(Ranks()[0].session_id(), client.session().session_id());
  }
  ExpectJobIntact();
}

TEST_F(BadInput, GarbageOnTheSocketIsHungUpOn) {
  StartDaemonWithJob();
  std::string noise(4096, '\0');
  for (size_t i = 0; i < noise.size(); ++i) noise[i] = static_cast<char>(i * 7919 >> 3);
  const std::string texts[] = {
      "GET / HTTP/1.1\r\n\r\n", noise, "P" + noise, "S" + noise, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + noise, "SHFD"};
  for (const std::string& text : texts) {
    const UniqueFd connected = ConnectTo(socket());
    const int fd = connected.get();
    ASSERT_TRUE(connected.valid());
    (void)!send(fd, text.data(), text.size(), MSG_NOSIGNAL);
    shutdown(fd, SHUT_WR);
    // Whatever is answered, it ends.
    EXPECT_TRUE(PollUntil([fd] {
      char buffer[4096];
      return recv(fd, buffer, sizeof(buffer), MSG_DONTWAIT) == 0 || (errno != EAGAIN && errno != EINTR);
    })) << text.substr(0, 20);
  }
  ExpectJobIntact();
}

}  // namespace
}  // namespace shardd::faults
