#ifndef SHARDD_TESTS_SERVER_PEER_PEER_FIXTURE_H_
#define SHARDD_TESTS_SERVER_PEER_PEER_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/peer/peer_network.h"
#include "tests/server/peer/recorder.h"
#include "tests/testing/grpc_process.h"

namespace shardd::testing {

inline PeerNetwork::Options Loopback() {
  KeepGrpc();
  PeerNetwork::Options options;
  options.listen = "127.0.0.1:0";
  return options;
}

inline v1::PeerMessage Step(int64_t step) {
  v1::PeerMessage message;
  message.set_generation(1);
  message.mutable_reduced()->set_step(step);
  return message;
}

// The daemons of several nodes in this process, each with its own port.
class Nodes {
 public:
  explicit Nodes(int count, const PeerNetwork::Options& options = Loopback()) {
    for (int node = 0; node < count; ++node) {
      networks.push_back(*PeerNetwork::Create(options));
      addresses.push_back(absl::StrCat("127.0.0.1:", networks.back()->port()));
      recorders.push_back(std::make_unique<Recorder>(count));
    }
    links.resize(count);
  }
  ~Nodes() {
    for (size_t node = 0; node < links.size(); ++node) {
      Leave(static_cast<int>(node));
      EXPECT_EQ(recorders[node]->broken(), "") << "node " << node;
    }
  }
  // Another daemon for the node, before anybody joins.
  void Replace(int node, const PeerNetwork::Options& options) {
    absl::StatusOr<std::unique_ptr<PeerNetwork>> network = PeerNetwork::Create(options);
    ASSERT_TRUE(network.ok()) << network.status();
    networks[node] = *std::move(network);
    addresses[node] = absl::StrCat("127.0.0.1:", networks[node]->port());
  }
  PeerJoin Options(int node) const {
    return {.job = "llm", .uid = 1000, .node = node, .addresses = addresses, .spec = "what it is made of"};
  }
  void Join(int node) { Join(node, Options(node)); }
  void Join(int node, const PeerJoin& options) {
    absl::StatusOr<std::unique_ptr<PeerLinks>> joined = networks[node]->Join(options, recorders[node].get());
    ASSERT_TRUE(joined.ok()) << joined.status();
    links[node] = *std::move(joined);
  }
  void Leave(int node) {
    if (links[node] != nullptr) {
      links[node].reset();
      recorders[node]->Close();
    }
  }
  void JoinAll() {
    for (size_t node = 0; node < links.size(); ++node) {
      Join(static_cast<int>(node));
    }
    for (size_t a = 0; a < links.size(); ++a) {
      for (size_t b = 0; b < links.size(); ++b) {
        ASSERT_TRUE(a == b || recorders[a]->WaitUp(static_cast<int>(b)))
            << "node " << a << " to " << b << ": "
            << ::testing::PrintToString(recorders[a]->node(static_cast<int>(b)).downs);
      }
    }
  }
  Recorder& at(int node) { return *recorders[node]; }

  std::vector<std::unique_ptr<PeerNetwork>> networks;
  std::vector<std::string> addresses;
  std::vector<std::unique_ptr<Recorder>> recorders;
  std::vector<std::unique_ptr<PeerLinks>> links;
};

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_SERVER_PEER_PEER_FIXTURE_H_
