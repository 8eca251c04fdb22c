// Links whose connections go through a middlebox that harms them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "tests/server/peer/peer_fixture.h"
#include "tests/testing/tcp_proxy.h"

namespace shardd::testing {
namespace {

using Fault = TcpProxy::Fault;

PeerNetwork::Options QuickKeepalive() {
  PeerNetwork::Options options = Loopback();
  options.keepalive_ms = 1000;
  return options;
}

// Nodes that reach each other through a proxy in front of each.
class ProxiedNodes : public Nodes {
 public:
  explicit ProxiedNodes(int count) : Nodes(count, QuickKeepalive()) {
    for (int node = 0; node < count; ++node) {
      proxies.push_back(std::make_unique<TcpProxy>(networks[node]->port()));
      addresses[node] = proxies.back()->address();
    }
  }
  ~ProxiedNodes() {
    for (std::unique_ptr<TcpProxy>& proxy : proxies) {
      proxy.reset();  // no half-dead connection holds up the end of links
    }
  }
  std::vector<std::unique_ptr<TcpProxy>> proxies;
};

class PeerProxyTest : public ::testing::TestWithParam<Fault> {};

// The middlebox closes one side of a connection, and the node that saw it calls again while the other one has its link.
TEST_P(PeerProxyTest, LinkIsMadeAgainWhateverEndedIt) {
  ProxiedNodes nodes(2);
  nodes.JoinAll();
  for (int round = 2; round < 4; ++round) {
    nodes.proxies[0]->HarmAll(GetParam());
    for (const int node : {0, 1}) {
      ASSERT_TRUE(
          nodes.at(node).Await(1 - node, [round](const Recorder::Node& seen) { return seen.up && seen.ups >= round; }))
          << "node " << node << ", round " << round;
    }
    const auto said = static_cast<size_t>(round - 1);
    nodes.links[0]->Send(1, Step(round));
    nodes.links[1]->Send(0, Step(round));
    ASSERT_TRUE(nodes.at(0).WaitMessages(1, said));
    ASSERT_TRUE(nodes.at(1).WaitMessages(0, said));
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, PeerProxyTest,
                         ::testing::Values(Fault::kClose, Fault::kReset, Fault::kResetCaller, Fault::kResetTarget,
                                           Fault::kFinToCaller, Fault::kFinToTarget, Fault::kSilence));

// Each link's messages and pieces, as they were sent: numbers without a gap. OnUp begins a link.
class Counting final : public Recorder {
 public:
  explicit Counting(int nodes) : Recorder(nodes), next_(static_cast<size_t>(nodes)) {}
  void OnUp(int node) override {
    next_[static_cast<size_t>(node)] = {};
    Recorder::OnUp(node);
  }
  void OnMessage(int node, v1::PeerMessage message, PeerReceipt /*receipt*/) override {
    Check(next_[static_cast<size_t>(node)].step, static_cast<uint64_t>(message.reduced().step()), "step");
    ++messages;
    OnNothing(node);
  }
  void OnData(int node, const v1::PeerData& header, absl::string_view elements) override {
    Check(next_[static_cast<size_t>(node)].piece, header.sequence(), "piece");
    if (elements != std::string(elements.size(), static_cast<char>(header.sequence() % 251))) {
      ++wrong;
    }
    ++pieces;
    OnNothing(node);
  }

  std::atomic<int> messages = 0, pieces = 0, wrong = 0;

 private:
  struct Next {
    uint64_t step = 0, piece = 0;  // 0: whatever comes
  };
  void Check(uint64_t& next, uint64_t got, const char* what) {
    if (next != 0 && got != next) {
      ADD_FAILURE() << what << " is out of order: got " << got << ", want " << next;
    }
    next = got + 1;
  }
  std::vector<Next> next_;  // by node; of its events
};

// How many seeds: for a long run, SHARDD_PROXY_SEEDS=1000.
int Seeds() {
  int seeds = 4;
  if (const char* text = std::getenv("SHARDD_PROXY_SEEDS"); text != nullptr) {
    EXPECT_TRUE(absl::SimpleAtoi(text, &seeds)) << text;
  }
  return seeds;
}

TEST(PeerProxyScheduleTest, LinksHoldTheirPromisesWhateverConnectionsDo) {
  constexpr int kNodes = 3;
  constexpr absl::Duration kHarmed = absl::Milliseconds(800);
  for (int seed = 1; seed <= Seeds(); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::atomic<int> unsent = 0;
    ProxiedNodes nodes(kNodes);
    std::vector<Counting*> counts;
    for (int node = 0; node < kNodes; ++node) {
      auto counting = std::make_unique<Counting>(kNodes);
      counts.push_back(counting.get());
      nodes.recorders[node] = std::move(counting);
      nodes.proxies[node]->SetChoose(TcpProxy::Random(static_cast<uint64_t>(seed) * 100 + static_cast<uint64_t>(node)));
    }
    for (int node = 0; node < kNodes; ++node) {
      nodes.Join(node);
    }
    uint64_t sent = 0;
    const auto talk = [&](size_t piece_bytes) {
      ++sent;
      const std::string piece(piece_bytes, static_cast<char>(sent % 251));
      std::vector<std::shared_ptr<std::string>> pieces;
      for (int a = 0; a < kNodes; ++a) {
        for (int b = 0; b < kNodes; ++b) {
          if (a == b) {
            continue;
          }
          nodes.links[a]->Send(b, Step(static_cast<int64_t>(sent)));
          v1::PeerData header;
          header.set_sequence(sent);
          header.set_numel(static_cast<int64_t>(piece_bytes) / 4);
          ++unsent;
          auto kept = std::make_shared<std::string>(piece);
          nodes.links[a]->SendData(b, header, *kept, [&unsent, kept](absl::Status) { --unsent; });
        }
      }
    };
    for (const absl::Time end = absl::Now() + kHarmed; absl::Now() < end; absl::SleepFor(absl::Milliseconds(2))) {
      talk(sent % 16 == 0 ? 64 << 10 : 256);
    }
    // The network is well again: what is half dead goes, and everybody hears everybody.
    for (const std::unique_ptr<TcpProxy>& proxy : nodes.proxies) {
      proxy->SetChoose(nullptr);
      proxy->HarmAll(Fault::kReset);
    }
    std::vector<int> before;
    for (Counting* count : counts) {
      before.push_back(count->messages);
    }
    ASSERT_TRUE(PollUntil([&] {
      talk(256);
      bool all = true;
      for (int a = 0; a < kNodes; ++a) {
        for (int b = 0; b < kNodes; ++b) {
          all = all && (a == b || nodes.at(a).node(b).up);
        }
        all = all && counts[a]->messages > before[a] + 100;
      }
      return all;
    })) << "links did not come back";
    for (int node = 0; node < kNodes; ++node) {
      nodes.Leave(node);
      EXPECT_EQ(counts[node]->wrong, 0) << "node " << node;
      EXPECT_GT(counts[node]->pieces, 0) << "node " << node;
    }
    EXPECT_EQ(unsent, 0);
  }
}

}  // namespace
}  // namespace shardd::testing
