// Programs that connect as daemons do and are none.

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "common/shm/unique_fd.h"
#include "common/versions/versions.h"
#include "server/peer/peer_stream.h"
#include "server/peer/peer_wire.h"
#include "tests/common/shm/process_util.h"
#include "tests/server/peer/peer_fixture.h"

namespace shardd::testing {
namespace {

using ::testing::HasSubstr;

PeerNetwork::Options Impatient() {
  PeerNetwork::Options options = Loopback();
  options.handshake_patience = absl::Milliseconds(300);
  return options;
}

// Answers HTTP/2's settings, when it is told to, and no call ever.
class SettingsAlone {
 public:
  explicit SettingsAlone(bool answers = true)
      : answers_(answers), listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(listener_.get(), 64), 0);
    EXPECT_EQ(getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Run(); });
  }
  ~SettingsAlone() {
    stopping_ = true;
    thread_.join();
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }
  int accepted() const { return accepted_; }
  int answered() const { return answered_; }
  void Answer() { answers_ = true; }

 private:
  void Run() {
    constexpr char kSettings[] = "\0\0\0\x4\0\0\0\0\0";
    constexpr char kAck[] = "\0\0\0\x4\x1\0\0\0\0";
    while (!stopping_) {
      pollfd ready{listener_.get(), POLLIN, 0};
      if (poll(&ready, 1, 10) == 1) {
        connections_.emplace_back(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        ++accepted_;
      }
      for (; answers_ && answered_ < accepted_; ++answered_) {
        for (const char* frame : {kSettings, kAck}) {
          EXPECT_EQ(send(connections_[static_cast<size_t>(answered_)].get(), frame, 9, MSG_NOSIGNAL), 9);
        }
      }
      char bytes[4096];
      for (const UniqueFd& connection : connections_) {
        while (recv(connection.get(), bytes, sizeof(bytes), MSG_DONTWAIT) > 0) {
        }
      }
    }
  }
  std::atomic<bool> answers_;
  const UniqueFd listener_;
  int port_ = 0;
  std::vector<UniqueFd> connections_;
  std::atomic<int> accepted_ = 0;
  std::atomic<int> answered_ = 0;
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

TEST(PeerCallsTest, WhoAnswersOnlySettingsIsHarmlesslyCalledAnew) {
  SettingsAlone other;
  Nodes nodes(3, Impatient());
  nodes.addresses[0] = other.address();
  nodes.Join(1);
  nodes.Join(2);
  ASSERT_TRUE(nodes.at(1).WaitDowns(0, 1));
  EXPECT_THAT(std::string(nodes.at(1).node(0).downs[0].message()), HasSubstr("no answer within 300ms"));
  ASSERT_TRUE(PollUntil([&] { return other.accepted() >= 6; }));  // of each node a few
  ASSERT_TRUE(nodes.at(1).WaitUp(2));
  nodes.links[2]->Send(1, Step(1));
  EXPECT_TRUE(nodes.at(1).WaitMessages(2, 1));
}

// As where node 0's daemon is slow, and the job has ended here.
TEST(PeerCallsTest, AnAnswerThatComesLateLeavesNoSocket) {
  Nodes nodes(2);
  nodes.Join(1);  // what gRPC opens once
  nodes.Leave(1);
  const int before = CountFds();
  {
    SettingsAlone other(/*answers=*/false);
    nodes.addresses[0] = other.address();
    nodes.Join(1);
    ASSERT_TRUE(PollUntil([&] { return other.accepted() == 1; }));
    nodes.Leave(1);
    other.Answer();
    ASSERT_TRUE(PollUntil([&] { return other.answered() == 1; }));
  }
  EXPECT_TRUE(PollUntil([&] { return CountFds() <= before; })) << CountFds() << ", want " << before;
}

// A caller of Link that says what the test says.
class Caller {
 public:
  explicit Caller(const std::string& address)
      : channel_(Channel(address)), stream_(CallPeer(channel_, "/shardd.v1.PeerService/Link")) {
    stream_->Read([state = state_](absl::StatusOr<grpc::ByteBuffer> answer) {
      state->status = answer.status();
      state->answered.Notify();
    });
  }
  ~Caller() {
    stream_->Abort(absl::CancelledError());
    EXPECT_TRUE(PollUntil([this] { return stream_->gone(); }));
    // The last channel of a process waits for gRPC's threads when it is destroyed: none of them may do that.
    EXPECT_EQ(channel_.use_count(), 1) << "gRPC, or the stream, still has the channel of a stream that is gone";
  }
  void SayHello(const std::string& token) {
    v1::PeerMessage message;
    v1::PeerHello& hello = *message.mutable_hello();
    hello.set_protocol_version(kProtocolVersions.newest);
    hello.set_job("llm");
    hello.set_uid(1000);
    hello.set_node(1);
    hello.set_token(token);
    EXPECT_TRUE(stream_->Write(*EncodePeer(message, kMaxPeerHelloBytes), kMaxPeerHelloBytes));
  }
  // With a connection of its own.
  static std::shared_ptr<grpc::Channel> Channel(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(absl::StrCat("dns:///", address), grpc::InsecureChannelCredentials(), arguments);
  }
  // How it was answered.
  absl::Status Await() {
    return state_->answered.WaitForNotificationWithTimeout(kLimit) ? state_->status : absl::DeadlineExceededError("");
  }

 private:
  struct State {
    absl::Notification answered;
    absl::Status status;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
  const std::shared_ptr<grpc::Channel> channel_;
  std::shared_ptr<PeerStream> stream_;
};

TEST(PeerCallsTest, TwoCallsWithOneTokenAreOneNodeCallingAgain) {
  Nodes nodes(2, Impatient());
  nodes.Join(0);
  const std::string token = "0123456789abcdef";
  Caller first(nodes.addresses[0]);
  first.SayHello(token);
  EXPECT_TRUE(first.Await().ok());
  for (int i = 0; i < 3; ++i) {
    Caller again(nodes.addresses[0]);
    again.SayHello(token);
    EXPECT_TRUE(again.Await().ok()) << again.Await();
  }
  nodes.Join(1);  // with a token of its own: when the last of those has had its time
  EXPECT_TRUE(nodes.at(1).WaitUp(0));
  EXPECT_TRUE(nodes.at(0).WaitUp(1));
}

TEST(PeerCallsTest, ANodeWithoutALinkIsNotTakenForAnOlderOne) {
  Nodes nodes(2, Impatient());
  nodes.Join(0);
  EXPECT_TRUE(nodes.links[0]->takes_writes_where_cut(1));
  nodes.Join(1);
  ASSERT_TRUE(nodes.at(0).WaitUp(1));
  EXPECT_TRUE(nodes.links[0]->takes_writes_where_cut(1));
}

TEST(PeerCallsTest, StreamsWithoutHelloAreBounded) {
  Nodes nodes(2);
  std::vector<std::unique_ptr<Caller>> silent;
  for (int i = 0; i < 160; ++i) {
    silent.push_back(std::make_unique<Caller>(nodes.addresses[0]));
  }
  absl::Status refused;
  EXPECT_TRUE(PollUntil([&] {
    Caller probe(nodes.addresses[0]);
    probe.SayHello("0123456789abcdef");
    refused = probe.Await();
    return absl::IsResourceExhausted(refused);
  })) << refused;
  silent.clear();
  nodes.JoinAll();
}

}  // namespace
}  // namespace shardd::testing
