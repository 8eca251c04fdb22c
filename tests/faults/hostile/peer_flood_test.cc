// Whoever reaches the port of other nodes and is no daemon, from another address of this host: two nodes find each
// other there and train meanwhile.

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "tests/e2e/nodes/nodes.h"
#include "tests/faults/hostile/http2_client.h"
#include "tests/testing/sanitizers.h"

namespace shardd::faults {
namespace {

constexpr int64_t kMostBytes = (testing::kSanitized ? 640 : 64) * (int64_t{1} << 20);
constexpr char kMethod[] = "/shardd.v1.PeerService/Link";

class PeerPort : public e2e::Nodes {
 protected:
  void Begin() {
    Start(2, 1);
    Train("before");  // what any job of two nodes costs once
    resident_ = Resident();
  }
  void Train(const std::string& name) {
    const e2e::Args job = {{"name", name}, {"steps", "50"}};
    for (const e2e::TrainerReport& report : RunAll(job)) EXPECT_EQ(report.code, 0) << report.message;
  }
  int64_t Resident() {
    std::ifstream status(absl::StrCat("/proc/", node(0).daemon_pid(), "/status"));
    for (std::string line; std::getline(status, line);) {
      if (absl::StartsWith(line, "VmRSS:")) return std::atoll(line.c_str() + 6) * 1024;
    }
    ADD_FAILURE() << "no VmRSS";
    return 0;
  }
  UniqueFd Connect() { return http2::ConnectToPort(addresses()[0]); }
  void ExpectServesAndHasNoMore() {
    EXPECT_LT(Resident() - resident_, kMostBytes);
    Train("behind");
    EXPECT_TRUE(node(0).DaemonAlive());
  }

  int64_t resident_ = 0;
};

struct Attack {
  const char* name;
  int clients;
  int most;  // of what it does, by each client
  std::function<bool(http2::Client&, int i)> act;
};
std::ostream& operator<<(std::ostream& out, const Attack& attack) { return out << attack.name; }

class PeerPortFlood : public PeerPort, public ::testing::WithParamInterface<Attack> {};

bool CallAndReset(http2::Client& client, int i) {
  const uint32_t stream = 2 * static_cast<uint32_t>(i) + 1;
  return client.Send(http2::Call(stream, kMethod) + http2::Reset(stream));
}

INSTANTIATE_TEST_SUITE_P(Of, PeerPortFlood,
                         ::testing::Values(Attack{"Resets", 1, 20'000, CallAndReset},
                                           Attack{"ResetsOnManyConnections", 20, 1'000, CallAndReset},
                                           Attack{"Pings", 20, 100'000,
                                                  [](http2::Client& client, int) {
                                                    return client.Send(http2::Frame(http2::kPing, 0, 0, "12345678"));
                                                  }},
                                           Attack{"Settings", 20, 100'000,
                                                  [](http2::Client& client, int) {
                                                    return client.Send(http2::Frame(http2::kSettings, 0, 0));
                                                  }}),
                         [](const auto& info) { return info.param.name; });

TEST_P(PeerPortFlood, StopsNoNodeAndTakesNoMemory) {
  const Attack& attack = GetParam();
  Begin();
  std::atomic<bool> stop = false;
  std::vector<std::unique_ptr<http2::Client>> clients;
  std::vector<std::thread> flooding;
  for (int c = 0; c < attack.clients; ++c) {
    clients.push_back(std::make_unique<http2::Client>(Connect()));
    flooding.emplace_back([&attack, &stop, &client = *clients.back()] {
      for (int i = 0; i < attack.most && !stop && attack.act(client, i); ++i) {
      }
    });
  }
  Train("victim");
  stop = true;
  for (const auto& client : clients) client->Close();
  for (std::thread& thread : flooding) thread.join();
  ExpectServesAndHasNoMore();
}

// Each has called, and so may stay for a while. Which are kept shows in the settings that a server says first.
TEST_F(PeerPort, KeepsConnectionsOfOneHostFromTakingAllPlaces) {
  constexpr int kConnections = 1500;
  constexpr int kMostOfOneHost = 1024;
  Begin();
  std::vector<UniqueFd> connections;
  int served = 0;
  for (int i = 0; i < kConnections; ++i) {
    connections.push_back(Connect());
    const int fd = connections.back().get();
    const std::string call = http2::Preface() + http2::Call(1, kMethod);
    char byte = 0;
    if (send(fd, call.data(), call.size(), MSG_NOSIGNAL) > 0 && testing::Readable(fd) &&
        recv(fd, &byte, 1, MSG_DONTWAIT) == 1) {
      ++served;
    }
  }
  EXPECT_GT(served, 0);
  EXPECT_LE(served, kMostOfOneHost);
  Train("victim");
  connections.clear();
  ExpectServesAndHasNoMore();
}

}  // namespace
}  // namespace shardd::faults
