// A daemon that lies, hangs or dies, as the client sees it; and the death of a client, as the daemon sees it.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "common/shm/fd_channel.h"
#include "tests/common/shm/fd_channel_fixture.h"
#include "tests/common/shm/process_util.h"

namespace shardd {
namespace {

using testing::Child;
using testing::CountFds;
using testing::kLimit;

class HostileDaemonTest : public FdChannelTest {
 protected:
  // The code that FetchSessionFds gives in another process when the daemon answers with these bytes and hangs up; -1
  // where it kept a descriptor that it does not return.
  int CodeFor(const std::string& answer, const std::vector<int>& fds = {}) {
    Child client([&] {
      const int before = CountFds();
      const auto result = Fetch();
      ptrdiff_t kept = 0;
      if (result.ok()) {
        CHILD_CHECK(result->size() == static_cast<size_t>(kSessionFdCount));
        kept = std::count_if(result->begin(), result->end(), [](const UniqueFd& fd) { return fd.valid(); });
      }
      CHILD_CHECK(CountFds() == before + kept);
      return static_cast<int>(result.status().code());
    });
    UniqueFd socket = Accept();
    EXPECT_TRUE(ReadRequest(socket.get()).ok());
    if (!answer.empty()) {
      EXPECT_EQ(SendRaw(socket.get(), answer.data(), answer.size(), fds), static_cast<ssize_t>(answer.size()));
    }
    socket.reset();
    return client.Wait();
  }
  static std::string Header(int32_t code, uint32_t text_bytes, uint32_t descriptors, const char* magic = "SHFD") {
    shm_internal::ReplyWire wire{};
    std::memcpy(wire.magic, magic, 4);
    wire.code = code;
    wire.text_bytes = text_bytes;
    wire.descriptors = descriptors;
    return std::string(reinterpret_cast<const char*>(&wire), sizeof(wire));
  }
  static constexpr int kInternal = static_cast<int>(absl::StatusCode::kInternal);
  static constexpr int kUnavailable = static_cast<int>(absl::StatusCode::kUnavailable);
};

TEST_F(HostileDaemonTest, AnswersOutsideTheProtocolFailAndLeakNoDescriptor) {
  const UniqueFd event = Eventfd();
  const std::vector<int> all(kSessionFdCount, event.get());
  EXPECT_EQ(CodeFor(Header(0, 0, kSessionFdCount), all), 0);  // the honest one, for comparison
  EXPECT_EQ(CodeFor(Header(0, 0, kSessionFdCount, "HTTP"), all), kInternal);
  EXPECT_EQ(CodeFor(Header(17, 0, 0), all), kInternal);
  EXPECT_EQ(CodeFor(Header(-1, 0, 0), all), kInternal);
  EXPECT_EQ(CodeFor(Header(5, UINT32_MAX, 0), all), kInternal);
  EXPECT_EQ(CodeFor(Header(0, 0, kSessionFdCount)), kInternal);
  EXPECT_EQ(CodeFor(Header(0, 0, kSessionFdCount), {event.get()}), kInternal);
  for (const uint32_t count : {1, kSessionFdCount - 1, kSessionFdCount + 1, 20, 253}) {
    EXPECT_EQ(CodeFor(Header(0, 0, count), std::vector<int>(count, event.get())), kInternal) << count;
    EXPECT_EQ(CodeFor(Header(0, 0, kSessionFdCount), std::vector<int>(count, event.get())), kInternal) << count;
  }
  EXPECT_EQ(CodeFor(Header(0, 0, kSessionFdCount + 1), all), kInternal);
}

// Of a range that was asked for, too: no more, no less.
TEST_F(HostileDaemonTest, ARangeIsAnsweredWithJustSoManyDescriptors) {
  const UniqueFd event = Eventfd();
  for (const uint32_t sent : {0U, 1U, 252U, 253U}) {
    Child client([&] {
      const int before = CountFds();
      const auto result = FetchSessionFds(path(), 42, token_, kLimit, nullptr, {.first = 262, .count = 252});
      CHILD_CHECK(CountFds() == before + (result.ok() ? 252 : 0));
      return static_cast<int>(result.status().code());
    });
    UniqueFd socket = Accept();
    const auto request = ReadRequest(socket.get());
    ASSERT_TRUE(request.ok()) << request.status();
    EXPECT_EQ(request->range.first, 262u);
    EXPECT_EQ(request->range.count, 252u);
    const std::string answer = Header(0, 0, sent);
    ASSERT_EQ(SendRaw(socket.get(), answer.data(), answer.size(), std::vector<int>(sent, event.get())),
              static_cast<ssize_t>(answer.size()));
    socket.reset();
    EXPECT_EQ(client.Wait(), sent == 252 ? 0 : kInternal) << sent;
  }
  for (const uint32_t count : {0U, 254U}) {
    EXPECT_EQ(FetchSessionFds(path(), 42, token_, kLimit, nullptr, {.first = 0, .count = count}).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST_F(HostileDaemonTest, DaemonThatHangsUpIsUnavailable) {
  const UniqueFd event = Eventfd();
  EXPECT_EQ(CodeFor(""), kUnavailable);
  EXPECT_EQ(CodeFor("SHFD", {event.get()}), kUnavailable);
  EXPECT_EQ(CodeFor(Header(5, 100, 0) + "only a part"), kUnavailable);
}

TEST_F(HostileDaemonTest, AnswerInPiecesIsPutTogether) {
  const UniqueFd event = Eventfd();
  Child client([&] {
    const auto result = Fetch();
    CHILD_CHECK(result.status() == absl::NotFoundError("session 42"));
    return 0;
  });
  const UniqueFd socket = Accept();
  ASSERT_TRUE(ReadRequest(socket.get()).ok());
  for (const char byte : Header(5, 10, 0) + "session 42") {
    ASSERT_EQ(SendRaw(socket.get(), &byte, 1), 1);
  }
  EXPECT_EQ(client.Wait(), 0);
}

TEST_F(HostileDaemonTest, SilentDaemonCostsTheTimeoutAndNoMore) {
  const int fds = CountFds();
  const absl::Time start = absl::Now();
  EXPECT_EQ(Fetch(absl::Milliseconds(50)).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(49));
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  EXPECT_EQ(CountFds(), fds);
}

TEST_F(HostileDaemonTest, SilentDaemonIsLeftWhenTheCallerIsInterrupted) {
  int asked = 0;
  const auto result = FetchSessionFds(path(), 42, token_, 10 * kLimit, [&] { return ++asked == 3; });
  EXPECT_EQ(result.status().code(), absl::StatusCode::kCancelled) << result.status();
  EXPECT_EQ(asked, 3);
}

TEST_F(HostileDaemonTest, FullBacklogCostsTheTimeoutAndNoMore) {
  std::vector<UniqueFd> waiting;
  for (int i = 0; i < 9; ++i) {  // the backlog is 8: the kernel takes one more
    waiting.push_back(ConnectRaw());
    ASSERT_TRUE(waiting.back().valid());
  }
  EXPECT_EQ(Fetch(absl::Milliseconds(50)).status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(HostileDaemonTest, NobodyThereIsUnavailableAtOnce) {
  listener_.reset();  // the file stays: connection refused
  EXPECT_EQ(Fetch().status().code(), absl::StatusCode::kUnavailable);
  unlink(path().c_str());
  EXPECT_EQ(Fetch().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(FetchSessionFds("", 1, token_, kLimit).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FetchSessionFds("/" + std::string(200, 'x'), 1, token_, kLimit).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// A trainer that forks (a data loader) and is killed: its child keeps every socket open, so no hang-up ever comes.
TEST_F(HostileDaemonTest, PidfdsShowADeathWhileAChildHoldsTheSocket) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  Child trainer([&] {
    const UniqueFd socket = ConnectRaw();
    const shm_internal::RequestWire request = Request();
    const UniqueFd own(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
    CHILD_CHECK(SendRaw(socket.get(), &request, sizeof(request), {own.get()}) == sizeof(request));
    const pid_t grandchild = fork();
    if (grandchild == 0) {
      pause();
      _exit(0);
    }
    CHILD_CHECK(write(ready[1], &grandchild, sizeof(grandchild)) == sizeof(grandchild));
    pause();
    return 0;
  });
  const UniqueFd socket = Accept();
  const UniqueFd by_socket = GetPeerPidfd(socket.get());
  auto request = ReadRequest(socket.get());
  ASSERT_TRUE(request.ok()) << request.status();
  if (!by_socket.valid()) {
    GTEST_SKIP() << "this kernel has no SO_PEERPIDFD (6.5); the pidfd that the client sends is all there is";
  }
  ASSERT_TRUE(request->pidfd.valid());
  pid_t grandchild = 0;
  ASSERT_EQ(read(ready[0], &grandchild, sizeof(grandchild)), static_cast<ssize_t>(sizeof(grandchild)));

  EXPECT_FALSE(testing::Readable(by_socket.get(), absl::ZeroDuration()));
  EXPECT_FALSE(testing::Readable(request->pidfd.get(), absl::ZeroDuration()));
  const absl::Time start = absl::Now();
  trainer.Kill();
  EXPECT_TRUE(testing::Readable(by_socket.get(), absl::Seconds(5)));
  EXPECT_TRUE(testing::Readable(request->pidfd.get(), absl::Seconds(5)));
  EXPECT_LT(absl::Now() - start, absl::Seconds(1));
  pollfd entry = {.fd = socket.get(), .events = POLLIN | POLLRDHUP, .revents = 0};
  EXPECT_EQ(poll(&entry, 1, 0), 0) << "the socket shows nothing: the grandchild has it";

  EXPECT_EQ(kill(grandchild, SIGKILL), 0);  // still alive
  EXPECT_TRUE(testing::PollUntil([&] { return poll(&entry, 1, 0) == 1; }));
  close(ready[0]);
  close(ready[1]);
}

TEST_F(HostileDaemonTest, PidfdOfASocketWithoutAPeerIsInvalid) {
  const UniqueFd event = Eventfd();
  EXPECT_FALSE(GetPeerPidfd(event.get()).valid());
  EXPECT_FALSE(GetPeerPidfd(-1).valid());
}

}  // namespace
}  // namespace shardd
