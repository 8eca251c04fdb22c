#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_NODES_NODE_LINKS_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_NODES_NODE_LINKS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/peer/peer_network.h"
#include "tests/server/collective/nodes/fake_links.h"
#include "tests/testing/grpc_process.h"

namespace shardd::testing {

// The links of a job's nodes, which are in one process: queues of it, or the daemons' sockets. It outlives what joins.
class NodeLinks {
 public:
  NodeLinks(int nodes, bool sockets) : fake_(sockets ? nullptr : std::make_unique<FakeLinkWorld>(nodes)) {
    for (int node = 0; node < nodes && sockets; ++node) {
      KeepGrpc();
      PeerNetwork::Options options;
      options.listen = "127.0.0.1:0";
      networks_.push_back(*PeerNetwork::Create(options));
      addresses_.push_back(absl::StrCat("127.0.0.1:", networks_.back()->port()));
    }
  }
  bool are_sockets() const { return fake_ == nullptr; }
  std::unique_ptr<PeerLinks> Join(int node, PeerLinks::Events* events) {
    if (fake_ != nullptr) return fake_->Join(node, events);
    const PeerJoin job = {.job = "llm", .uid = 1, .node = node, .addresses = addresses_, .spec = ""};
    return *networks_[static_cast<size_t>(node)]->Join(job, events);
  }

 private:
  const std::unique_ptr<FakeLinkWorld> fake_;
  std::vector<std::unique_ptr<PeerNetwork>> networks_;
  std::vector<std::string> addresses_;
};

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_NODES_NODE_LINKS_H_
