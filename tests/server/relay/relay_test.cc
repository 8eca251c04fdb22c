#include "server/relay/relay.h"

#include <sys/socket.h>

#include <cerrno>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "server/relay/http2_meter.h"
#include "tests/testing/poll.h"

namespace shardd {
namespace {

using testing::PollUntil;

const std::string kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

// Both ends of a relayed connection are this test's.
class RelayTest : public ::testing::Test {
 protected:
  void Connect(const RelayOptions& options = {}, uint32_t uid = 7) {
    if (relay_ == nullptr) {
      auto relay = Relay::Create(options);
      ASSERT_TRUE(relay.ok()) << relay.status();
      relay_ = *std::move(relay);
    }
    auto [client, its] = Pair();
    auto [inner, grpcs] = Pair();
    client_ = std::move(client);
    grpc_ = std::move(grpcs);
    relay_->Add(std::move(its), std::move(inner), uid);
  }
  static std::pair<UniqueFd, UniqueFd> Pair() {
    int pair[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair), 0);
    return {UniqueFd(pair[0]), UniqueFd(pair[1])};
  }
  static std::string Reset(int calls) {  // a call and its reset, so often
    std::string bytes;
    for (int i = 0; i < calls; ++i) {
      bytes += std::string("\0\0\0\x1\x4\0\0\0\x1", 9) + std::string("\0\0\x4\x3\0\0\0\0\x1\0\0\0\x8", 13);
    }
    return bytes;
  }
  // What has come to `fd` by now.
  static std::string Drain(int fd) {
    std::string all;
    char buffer[4096];
    ssize_t bytes = 0;
    while ((bytes = ::recv(fd, buffer, sizeof(buffer), MSG_DONTWAIT)) > 0) all.append(buffer, bytes);
    return all;
  }
  // Writes all of `bytes` to `from` and reads it from `to`; both would block otherwise.
  static std::string Carry(int from, int to, const std::string& bytes) {
    std::string got;
    size_t sent = 0;
    (void)PollUntil([&] {
      if (sent < bytes.size()) {
        const ssize_t n = ::send(from, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        sent += n > 0 ? static_cast<size_t>(n) : 0;
      }
      got += Drain(to);
      return got.size() >= bytes.size();
    });
    return got;
  }
  static bool IsClosed(int fd) {
    return PollUntil([fd] {
      char byte;
      const ssize_t n = ::recv(fd, &byte, 1, MSG_DONTWAIT);
      return n == 0 || (n < 0 && errno != EAGAIN);
    });
  }

  std::unique_ptr<Relay> relay_;
  UniqueFd client_, grpc_;
};

TEST_F(RelayTest, CarriesBothWaysAsItIs) {
  Connect();
  std::string large = kPreface;
  for (int i = 0; i < 300; ++i) {  // DATA of 16 KiB
    large += std::string("\0\x40\0\0\0\0\0\0\x1", 9) + std::string(16384, static_cast<char>(i));
  }
  EXPECT_EQ(Carry(client_.get(), grpc_.get(), large), large);
  EXPECT_EQ(Carry(grpc_.get(), client_.get(), large), large);
}

TEST_F(RelayTest, WhatTheClientHasSaidBeforeItWentIsHeard) {
  Connect();
  ASSERT_EQ(::send(client_.get(), kPreface.data(), kPreface.size(), 0), static_cast<ssize_t>(kPreface.size()));
  client_.reset();
  std::string got;
  EXPECT_TRUE(PollUntil([&] { return (got += Drain(grpc_.get())).size() == kPreface.size(); }));
  EXPECT_TRUE(IsClosed(grpc_.get()));
}

TEST_F(RelayTest, WhatGrpcHasSaidBeforeItClosedIsHeard) {
  Connect();
  ASSERT_EQ(::send(grpc_.get(), "bye", 3, 0), 3);
  grpc_.reset();
  std::string got;
  EXPECT_TRUE(PollUntil([&] { return (got += Drain(client_.get())) == "bye"; }));
  EXPECT_TRUE(IsClosed(client_.get()));
}

TEST_F(RelayTest, AFloodOfResetsPassesAtItsPrice) {
  Connect({.connection_rate = 0.25, .connection_burst = absl::Milliseconds(10)});
  constexpr int kResets = 300;
  const absl::Time start = absl::Now();
  const std::string flood = kPreface + Reset(kResets);
  EXPECT_EQ(Carry(client_.get(), grpc_.get(), flood), flood);  // and all of it does
  const absl::Duration price = kResets * (kPriceOfCall + kPriceOfReset) - absl::Milliseconds(20);
  EXPECT_GE(absl::Now() - start, price / 0.25);
}

TEST_F(RelayTest, AFloodedConnectionDoesNotStopAnotherOfItsUser) {
  Connect();
  const UniqueFd flooding = std::move(client_);
  const UniqueFd flooded = std::move(grpc_);
  const std::string flood = kPreface + Reset(5000);
  ASSERT_GT(::send(flooding.get(), flood.data(), flood.size(), MSG_DONTWAIT), 0);
  Connect();
  const std::string call = kPreface + Reset(1);
  EXPECT_EQ(Carry(client_.get(), grpc_.get(), call), call);
  EXPECT_LT(Drain(flooded.get()).size(), flood.size());  // the other has not come to its end by then
}

TEST_F(RelayTest, AConnectionWithoutACallIsClosed) {
  Connect({.first_call_timeout = absl::Milliseconds(50)});
  ASSERT_EQ(::send(client_.get(), kPreface.data(), kPreface.size(), 0), static_cast<ssize_t>(kPreface.size()));
  EXPECT_TRUE(IsClosed(client_.get()));
  EXPECT_TRUE(PollUntil([&] {
    (void)Drain(grpc_.get());
    return IsClosed(grpc_.get());
  }));
}

TEST_F(RelayTest, ARefusalIsTheAnswerToTheFirstCall) {
  auto relay = Relay::Create();
  ASSERT_TRUE(relay.ok());
  relay_ = *std::move(relay);
  auto [client, its] = Pair();
  relay_->Refuse(std::move(its), absl::ResourceExhaustedError("100% full"));
  const std::string call = kPreface + Reset(1);
  ASSERT_EQ(::send(client.get(), call.data(), call.size(), 0), static_cast<ssize_t>(call.size()));
  std::string got;
  EXPECT_TRUE(PollUntil([&, &client = client] {
    got += Drain(client.get());
    return absl::StrContains(got, "100%25 full");
  })) << got;
  EXPECT_TRUE(IsClosed(client.get()));
}

}  // namespace
}  // namespace shardd
