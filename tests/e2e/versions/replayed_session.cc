#include "tests/e2e/versions/replayed_session.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status/grpc_status.h"
#include "common/status/status_macros.h"
#include "gtest/gtest.h"
#include "tests/testing/poll.h"

namespace shardd::e2e {
namespace {

// Of the fd channel's answer, in all versions that are recorded.
constexpr size_t kReplyBytes = 16;
constexpr size_t kCodeAt = 4;
constexpr size_t kDescriptorsAt = 12;
constexpr size_t kShards = 3;
constexpr int kEpochShift = 40;

grpc::ByteBuffer BufferOf(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

std::string BytesOf(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (buffer.Dump(&slices).ok()) {
    for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

}  // namespace

ReplayedSession::ReplayedSession(const std::string& socket_path)
    : socket_path_(socket_path),
      stub_(std::make_unique<grpc::GenericStub>(
          grpc::CreateChannel("unix:" + socket_path, grpc::InsecureChannelCredentials()))) {}

ReplayedSession::~ReplayedSession() {
  if (stream_ == nullptr) return;
  context_.TryCancel();
  grpc::Status status;
  stream_->Finish(&status, this);
  Await();
}

bool ReplayedSession::Await() {
  void* tag = nullptr;
  bool ok = false;
  return queue_.Next(&tag, &ok) && ok;
}

absl::StatusOr<std::string> ReplayedSession::Call(const std::string& method, const std::string& bytes) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + testing::kLimit));
  grpc::ByteBuffer response;
  grpc::Status status;
  const auto call = stub_->PrepareUnaryCall(&context, "/shardd.v1.TrainerService/" + method, BufferOf(bytes), &queue_);
  call->StartCall();
  call->Finish(&response, &status, this);
  Await();
  SHARDD_RETURN_IF_ERROR(FromGrpcStatus(status));
  return BytesOf(response);
}

namespace {

// As protobuf writes it.
std::string Varint(uint64_t number) {
  std::string bytes;
  for (; number >= 128; number >>= 7) bytes.push_back(static_cast<char>(number | 128));
  bytes.push_back(static_cast<char>(number));
  return bytes;
}

// Sessions of a daemon that has had nothing else have small numbers: they are one byte in a message, and in an integer.
void PutNumber(uint64_t number, int64_t at, std::string& bytes) {
  EXPECT_LT(number, 128u);
  bytes[static_cast<size_t>(at)] = static_cast<char>(number);
}

}  // namespace

std::string ReplayedSession::OfThisSession(std::string bytes, int64_t number_at, int64_t token_at) const {
  PutNumber(session_.session_id(), number_at, bytes);
  bytes.replace(static_cast<size_t>(token_at), session_.token().size(), session_.token());
  return bytes;
}

absl::Status ReplayedSession::Hello(const std::string& bytes) {
  context_.set_deadline(absl::ToChronoTime(absl::Now() + testing::kLimit));
  stream_ = stub_->PrepareCall(&context_, "/shardd.v1.TrainerService/Session", &queue_);
  stream_->StartCall(this);
  if (!Await()) return absl::InternalError("no stream");
  stream_->Write(BufferOf(bytes), this);
  if (!Await()) return absl::InternalError("hello is not written");
  grpc::ByteBuffer event;
  stream_->Read(&event, this);
  v1::SessionEvent attached;
  if (!Await() || !attached.ParseFromString(BytesOf(event)) || !attached.has_attached()) {
    return absl::InternalError("the session is not confirmed");
  }
  return absl::OkStatus();
}

absl::Status ReplayedSession::FetchFds(const std::string& bytes, size_t count) {
  const UniqueFd connected = ConnectUnixSocket(socket_path_, SOCK_STREAM);
  if (send(connected.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(bytes.size())) {
    return absl::InternalError("the request for descriptors is not sent");
  }
  pollfd readable{connected.get(), POLLIN, 0};
  poll(&readable, 1, static_cast<int>(absl::ToInt64Milliseconds(testing::kLimit)));
  char answer[4096] = {};
  iovec buffer{answer, sizeof(answer)};
  alignas(cmsghdr) char control[CMSG_SPACE(64 * sizeof(int))];
  msghdr message{};
  message.msg_iov = &buffer;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t got = recvmsg(connected.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  const cmsghdr* const header = got < 0 ? nullptr : CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
    for (size_t i = 0; i < (header->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
      fds_.emplace_back(fd);
    }
  }
  int32_t code = 0;
  uint32_t said = 0;
  std::memcpy(&code, answer + kCodeAt, sizeof(code));
  std::memcpy(&said, answer + kDescriptorsAt, sizeof(said));
  if (got < static_cast<ssize_t>(kReplyBytes) || std::memcmp(answer, "SHFD", 4) != 0 || code != 0 || said != count ||
      fds_.size() != count) {
    return absl::InternalError(absl::StrCat("descriptors: code ", code, ", got ", fds_.size(), " of ", said, ", want ",
                                            count, ": ", answer + kReplyBytes));
  }
  return absl::OkStatus();
}

absl::Status ReplayedSession::Run(const Line& line) {
  const std::string& verb = line.word(0);
  if (verb == "open") {
    SHARDD_ASSIGN_OR_RETURN(const std::string answer, Call("OpenJob", line.bytes(1)));
    v1::OpenJobResponse opened;
    job_id_ = opened.ParseFromString(answer) ? opened.job_id() : 0;
    return absl::OkStatus();
  }
  if (verb == "attach") {
    std::string bytes = line.bytes(1);
    bytes.replace(static_cast<size_t>(line.number(2)), 1,
                  Varint(job_id_));  // which was one byte in the recorded daemon
    SHARDD_ASSIGN_OR_RETURN(const std::string answer, Call("AttachRank", bytes));
    return session_.ParseFromString(answer) ? absl::OkStatus() : absl::InternalError("the answer is none");
  }
  if (verb == "hello") return Hello(OfThisSession(line.bytes(1), line.number(2), line.number(3)));
  if (verb == "fds") {
    return FetchFds(OfThisSession(line.bytes(1), line.number(2), line.number(3)), static_cast<size_t>(line.number(4)));
  }
  if (verb == "map") {
    SHARDD_ASSIGN_OR_RETURN(memory_, MappedSlab::Map(std::move(fds_[0]), line.number(1), /*writable=*/true));
    SHARDD_ASSIGN_OR_RETURN(page_, MappedSlab::Map(std::move(fds_[1]), line.number(2), /*writable=*/false));
    return absl::OkStatus();
  }
  if (verb == "write") {
    const std::string bytes = line.bytes(2);
    std::memcpy(memory_.At<char>(line.number(1)), bytes.data(), bytes.size());
    return absl::OkStatus();
  }
  const uint64_t value = session_.epoch() << kEpochShift | static_cast<uint64_t>(line.number(2));
  if (verb == "submit") {
    memory_.At<std::atomic<uint64_t>>(line.number(1))->store(value);
    const uint64_t one = 1;
    return write(fds_[2].get(), &one, sizeof(one)) == sizeof(one) ? absl::OkStatus() : absl::InternalError("doorbell");
  }
  if (verb == "await") {
    const auto& word = *page_.At<const std::atomic<uint64_t>>(line.number(1));
    (void)testing::PollUntil([&] { return word.load() >= value; });
    return word.load() == value ? absl::OkStatus()
                                : absl::InternalError(absl::StrCat("the word at ", line.number(1), " says ",
                                                                   word.load(), ", want ", value));
  }
  if (verb == "shards") {
    const std::string want = line.bytes(1);
    return Shards(want.size()) == want ? absl::OkStatus() : absl::InternalError("the shards have other bits");
  }
  return absl::InvalidArgumentError("no such verb: " + verb);
}

std::string ReplayedSession::Shards(size_t size_bytes) const {
  std::string bytes(size_bytes, '\0');
  return pread(fds_[kShards].get(), bytes.data(), size_bytes, 0) == static_cast<ssize_t>(size_bytes) ? bytes : "";
}

}  // namespace shardd::e2e
