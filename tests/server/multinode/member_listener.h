#ifndef SHARDD_TESTS_SERVER_MULTINODE_MEMBER_LISTENER_H_
#define SHARDD_TESTS_SERVER_MULTINODE_MEMBER_LISTENER_H_

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "server/multinode/node_listeners.h"
#include "server/peer/peer_links.h"

namespace shardd::testing {

// Stands for the job behind a NodeMember, and does nothing of what the member tells; a test overrides what it looks at.
class MemberListener : public NodeFacts,
                       public NodeSumsListener,
                       public NodeStepsListener,
                       public NodeStateListener,
                       public NodeAttemptsListener {
 public:
  void NodeGo(const v1::PeerMessage::Go&) override {}
  void NodesClosed(int) override {}
  void NodesReduced(const std::vector<v1::PeerMessage::Reduced>&) override {}
  void NodeDecided(const v1::PeerMessage::Decided&) override {}
  void NodeValuesAgreed() override {}
  void NodeSendState(int, uint64_t) override {}
  void NodeStopSending(int) override {}
  void NodeBeginFetch(int, uint64_t) override {}
  void NodeTakeState(const v1::PeerMessage::State&) override {}
  void NodeTakeRankState(const v1::PeerMessage::RankState&) override {}
  void NodeEndFetch() override {}
  void NodeGeneration(uint64_t) override {}
  void NodeIsUp() override {}
  void NodesExtend(bool) override {}
  void Advance() override {}
};

// Keeps the messages of node `node` to all others. Data is sent at once, to nobody.
class KeptLinks final : public PeerLinks {
 public:
  KeptLinks(int node, int nodes) : node_(node), nodes_(nodes) {}
  int node() const override { return node_; }
  int nodes() const override { return nodes_; }
  void Send(int node, v1::PeerMessage message) override {
    if (message.has_fetch() && message.fetch().transfer() == 0) ended.push_back(node);
    sent.push_back(std::move(message));
  }
  void SendData(int, const v1::PeerData&, absl::string_view, std::function<void(absl::Status)> done) override {
    done(absl::OkStatus());
  }
  bool takes_fetch_ends(int) const override { return takes_ends; }
  void Renew(int node) override { renewed.push_back(node); }
  std::vector<v1::PeerMessage> sent;
  std::vector<int> ended;    // fetches, by node
  std::vector<int> renewed;  // links, by node
  bool takes_ends = true;

 private:
  const int node_;
  const int nodes_;
};

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_SERVER_MULTINODE_MEMBER_LISTENER_H_
