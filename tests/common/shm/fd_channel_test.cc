#include "common/shm/fd_channel.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "common/shm/session_view.h"
#include "common/shm/slab.h"
#include "tests/common/shm/fd_channel_fixture.h"
#include "tests/common/shm/process_util.h"

namespace shardd {
namespace {

using testing::Child;
using testing::CountFds;
using ::testing::HasSubstr;
using testing::kLimit;

TEST_F(FdChannelTest, ASessionsMemoryReachesAnotherProcessAndBothUseIt) {
  auto memory = Slab::Create("session", SlabBacking::kSealedMemfd, 8192);
  auto page = Slab::Create("page", SlabBacking::kFrozenMemfd, DaemonPageBytes(2, 3));
  ASSERT_TRUE(memory.ok() && page.ok());
  const UniqueFd doorbell = Eventfd();
  Child client([&] {
    auto fds = Fetch();
    CHILD_CHECK(fds.ok());
    CHILD_CHECK(fds->size() == static_cast<size_t>(kSessionFdCount));
    CHILD_CHECK(!(*fds)[kFdParameters].valid() && !(*fds)[kFdPool].valid() && !(*fds)[kFdGradients].valid());
    auto own = MappedSlab::Map(std::move((*fds)[kFdSessionMemory]), 8192, true);
    auto daemon = MappedSlab::Map(std::move((*fds)[kFdDaemonPage]), DaemonPageBytes(2, 3), false);
    CHILD_CHECK(own.ok() && daemon.ok());
    const ReadOnlyDaemonPageView view(daemon->data(), 2, 3);
    CHILD_CHECK(view.page().magic == DaemonPage::kMagic);
    auto* mine = own->At<ClientPage>(0);
    TimelineStore(mine->submitted, 1, nullptr);
    const uint64_t one = 1;
    CHILD_CHECK(write((*fds)[kFdDoorbell].get(), &one, sizeof(one)) == sizeof(one));
    CHILD_CHECK(TimelineWait(view.group(2).unsharded, 1, mine->waiting, kLimit) == WaitResult::kReached);
    return 0;
  });
  DaemonPageView view((*page)->data(), 2, 3);
  view.page().magic = DaemonPage::kMagic;
  {
    const UniqueFd socket = Accept();
    auto request = ReadRequest(socket.get());
    ASSERT_TRUE(request.ok()) << request.status();
    EXPECT_EQ(request->session_id, 42u);
    EXPECT_EQ(request->token, token_);
    EXPECT_EQ(request->protocol_version, static_cast<uint32_t>(kProtocolVersions.newest));
    EXPECT_TRUE(request->pidfd.valid());
    const auto page_fd = (*page)->ReadOnlyFd();
    ASSERT_TRUE(page_fd.ok());
    ASSERT_TRUE(SendFdReply(socket.get(), absl::OkStatus(),
                            {(*memory)->fd(), page_fd->get(), doorbell.get(), (*memory)->fd(), -1, -1, -1, -1, -1})
                    .ok());
  }
  ASSERT_TRUE(testing::Readable(doorbell.get()));
  EXPECT_EQ((*memory)->At<ClientPage>(0)->submitted.load(), 1u);
  TimelineStore(view.group(2).unsharded, 1, &(*memory)->At<ClientPage>(0)->waiting);
  EXPECT_EQ(client.Wait(), 0);
}

TEST_F(FdChannelTest, DescriptorsDoNotSurviveExecInTheTrainer) {
  Child client([&] {
    auto fds = Fetch();
    CHILD_CHECK(fds.ok());
    std::string script;
    for (const UniqueFd& fd : *fds) {
      CHILD_CHECK((fcntl(fd.get(), F_GETFD) & FD_CLOEXEC) != 0);
      script += absl::StrCat("if [ -e /proc/self/fd/", fd.get(), " ]; then exit 9; fi; ");
    }
    execl("/bin/sh", "sh", "-c", script.c_str(), nullptr);
    return 127;
  });
  const UniqueFd socket = Accept();
  ASSERT_TRUE(ReadRequest(socket.get()).ok());
  const UniqueFd event = Eventfd();
  ASSERT_TRUE(SendFdReply(socket.get(), absl::OkStatus(), std::vector<int>(kSessionFdCount, event.get())).ok());
  EXPECT_EQ(client.Wait(), 0);
}

TEST_F(FdChannelTest, CredentialsAreThoseOfTheConnectingProcess) {
  Child client([&] { return Fetch().status().code() == absl::StatusCode::kPermissionDenied ? 0 : 1; });
  const UniqueFd socket = Accept();
  const auto peer = GetPeerCredentials(socket.get());
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_EQ(peer->pid, client.pid());
  EXPECT_EQ(peer->uid, geteuid());
  EXPECT_EQ(peer->gid, getegid());
  ASSERT_TRUE(ReadRequest(socket.get()).ok());
  ASSERT_TRUE(SendFdReply(socket.get(), absl::PermissionDeniedError("not yours"), {}).ok());
  EXPECT_EQ(client.Wait(), 0);
  EXPECT_FALSE(GetPeerCredentials(listener_.get() + 1000).ok());
}

TEST_F(FdChannelTest, RefusalArrivesAsTheDaemonsOwnStatusWithoutDescriptors) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status refusal(static_cast<absl::StatusCode>(code), "session 42: the token is wrong");
    Child client([&] {
      const int fds = CountFds();
      CHILD_CHECK(Fetch().status() == refusal);
      CHILD_CHECK(CountFds() == fds);
      return 0;
    });
    const UniqueFd socket = Accept();
    ASSERT_TRUE(ReadRequest(socket.get()).ok());
    ASSERT_TRUE(SendFdReply(socket.get(), refusal, {listener_.get()}).ok());
    EXPECT_EQ(client.Wait(), 0) << refusal;
  }
}

TEST_F(FdChannelTest, LongTextIsCutAndStillArrives) {
  const std::string text(1 << 20, 'x');
  Child client([&] {
    const absl::Status status = Fetch().status();
    CHILD_CHECK(status.code() == absl::StatusCode::kInternal);
    CHILD_CHECK(status.message() == text.substr(0, shm_internal::kMaxReplyTextBytes));
    return 0;
  });
  const UniqueFd socket = Accept();
  ASSERT_TRUE(ReadRequest(socket.get()).ok());
  ASSERT_TRUE(SendFdReply(socket.get(), absl::InternalError(text), {}).ok());
  EXPECT_EQ(client.Wait(), 0);
}

TEST_F(FdChannelTest, TokenOfAnotherSizeIsNotEvenSent) {
  for (const size_t size_bytes : {0, 15, 17}) {
    EXPECT_EQ(FetchSessionFds(path(), 1, std::string(size_bytes, 't'), kLimit).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_FALSE(testing::Readable(listener_.get(), absl::ZeroDuration()));
}

TEST_F(FdChannelTest, NothingYetIsUnavailableAndEndsWhenTheRequestComes) {
  const UniqueFd client = ConnectRaw();
  const UniqueFd socket = Accept();
  EXPECT_EQ(ReadFdRequest(socket.get()).status().code(), absl::StatusCode::kUnavailable);
  const std::string bytes = RequestBytes();
  ASSERT_EQ(SendRaw(client.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  const auto request = ReadFdRequest(socket.get());
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->token, token_);
  EXPECT_FALSE(request->pidfd.valid());
}

TEST_F(FdChannelTest, ShortLongAndForeignRequestsAreInvalid) {
  std::vector<std::string> bad = {"", "S", "SHFD", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", std::string(4096, 'S')};
  bad.push_back(RequestBytes().substr(0, 39));
  bad.push_back(RequestBytes() + "x");
  bad.push_back(RequestBytes() + RequestBytes());
  for (const size_t position : {0, 3}) {  // a byte of the magic
    bad.push_back(RequestBytes());
    bad.back()[position] ^= 1;
  }
  bad.push_back(RequestBytes());
  bad.back()[36] = static_cast<char>(254);  // descriptors: more than a message holds
  const int fds = CountFds();
  for (const std::string& bytes : bad) {
    const absl::Status status = Serve(bytes).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bytes.size() << " bytes: " << status;
  }
  EXPECT_TRUE(Serve(RequestBytes()).ok());
  EXPECT_EQ(CountFds(), fds);
}

TEST_F(FdChannelTest, EveryRandomRequestIsRefusedOrReadButNeverMore) {
  uint32_t seed = 20261121;
  for (int round = 0; round < 300; ++round) {
    std::string bytes = RequestBytes();
    for (char& byte : bytes) {
      seed = seed * 1664525 + 1013904223;
      byte = (seed >> 24) % 8 == 0 ? static_cast<char>(seed >> 16) : byte;
    }
    seed = seed * 1664525 + 1013904223;
    bytes.resize((seed >> 20) % 3 == 0 ? (seed >> 8) % 100 : bytes.size());
    const auto request = Serve(bytes);
    uint32_t descriptors = 0;
    if (bytes.size() == 40) std::memcpy(&descriptors, bytes.data() + 36, sizeof(descriptors));
    const bool wanted = bytes.size() == 40 && bytes.substr(0, 4) == "SHFD" && descriptors <= kMaxFdsAtOnce;
    EXPECT_EQ(request.ok(), wanted) << "seed 20261121, round " << round << ": " << request.status();
  }
}

TEST_F(FdChannelTest, SurplusDescriptorsThatAClientSendsAreClosed) {
  const UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  ASSERT_TRUE(pidfd.valid());
  const int fds = CountFds();
  for (const size_t count : {1, 2, 3, 50, 253}) {
    const auto request = Serve(RequestBytes(), std::vector<int>(count, pidfd.get()));
    ASSERT_TRUE(request.ok()) << request.status();
    EXPECT_TRUE(request->pidfd.valid());
    EXPECT_NE(fcntl(request->pidfd.get(), F_GETFD) & FD_CLOEXEC, 0);
    EXPECT_EQ(CountFds(), fds + 1) << count;
  }
  EXPECT_EQ(CountFds(), fds);
  EXPECT_FALSE(Serve("SHFD", std::vector<int>(50, pidfd.get())).ok());
  EXPECT_FALSE(Serve(RequestBytes() + "x", std::vector<int>(50, pidfd.get())).ok());
  EXPECT_EQ(CountFds(), fds);
}

TEST_F(FdChannelTest, DescriptorThatIsNoPidfdIsNotTakenForOne) {
  const UniqueFd event = Eventfd();
  const int fds = CountFds();
  for (const int fd : {event.get(), listener_.get(), STDERR_FILENO}) {
    const auto request = Serve(RequestBytes(), {fd});
    ASSERT_TRUE(request.ok()) << request.status();
    EXPECT_FALSE(request->pidfd.valid());
    EXPECT_EQ(CountFds(), fds);
  }
}

TEST_F(FdChannelTest, AnsweringADeadClientFailsWithoutASignal) {
  UniqueFd client = ConnectRaw();
  const UniqueFd socket = Accept();
  client.reset();
  EXPECT_EQ(SendFdReply(socket.get(), absl::OkStatus(), std::vector<int>(kSessionFdCount, -1)).code(),
            absl::StatusCode::kUnavailable);
}

TEST(ParseUnixAddressTest, AcceptsPathsWithAndWithoutScheme) {
  for (const char* address : {"unix:/run/shardd/sock", "/run/shardd/sock", "unix:///run/shardd/sock"}) {
    EXPECT_EQ(ParseUnixAddress(address).value_or("-"), "/run/shardd/sock") << address;
  }
  const std::string longest = "/" + std::string(106, 'x');
  EXPECT_EQ(ParseUnixAddress("unix:" + longest).value_or("-"), longest);
}

TEST(ParseUnixAddressTest, RefusesEverythingElse) {
  for (const absl::string_view address :
       {absl::string_view(""), absl::string_view("/"), absl::string_view("unix:"), absl::string_view("unix:relative"),
        absl::string_view("relative/path"), absl::string_view("localhost:8080"), absl::string_view("unix-abstract:x"),
        absl::string_view("dns:///host:1"), absl::string_view("tcp:/x"), absl::string_view("/a\0b", 4)}) {
    EXPECT_EQ(ParseUnixAddress(address).status().code(), absl::StatusCode::kInvalidArgument) << address;
  }
  const absl::Status status = ParseUnixAddress("/" + std::string(107, 'x')).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("got 108 bytes, want at most 107"));
}

}  // namespace
}  // namespace shardd
