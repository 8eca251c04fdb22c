#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_NODES_PEER_WORLD_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_NODES_PEER_WORLD_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/collective/nodes/links/peer_exchange.h"
#include "server/job/wait.h"
#include "tests/server/collective/nodes/call_result.h"
#include "tests/server/collective/nodes/node_links.h"
#include "tests/testing/poll.h"

namespace shardd::testing {

// Hands data to a node's exchange, while there is one.
class Router final : public PeerLinks::Events {
 public:
  explicit Router(int nodes) : up_(nodes) {}
  absl::Status CheckHello(int, const v1::PeerHello&) override { return absl::OkStatus(); }
  void OnUp(int node) override {
    absl::MutexLock lock(&mutex_);
    up_[node] = true;
  }
  void OnMessage(int, v1::PeerMessage, PeerReceipt) override {}
  void OnDown(int node, absl::Status why) override {
    absl::MutexLock lock(&mutex_);
    up_[node] = false;
    if (exchange_ != nullptr) {
      exchange_->OnDown(node, why);
    }
  }
  void OnData(int node, const v1::PeerData& header, absl::string_view elements) override {
    absl::ReaderMutexLock lock(&mutex_);
    if (exchange_ != nullptr) {
      exchange_->OnData(node, header, elements);
    }
  }
  void Set(PeerExchange* exchange) {
    absl::MutexLock lock(&mutex_);
    exchange_ = exchange;
  }
  void Forget() {  // no event says that links have gone with their owner
    absl::MutexLock lock(&mutex_);
    up_.assign(up_.size(), false);
  }
  bool up(int node) const {
    absl::ReaderMutexLock lock(&mutex_);
    return up_[node];
  }

 private:
  mutable absl::Mutex mutex_;
  std::vector<bool> up_;
  PeerExchange* exchange_ = nullptr;
};

// What a node gives to one sum, and what becomes of it.
class Given : public CallResult {
 public:
  explicit Given(const std::vector<int64_t>& numels) {
    int64_t total = 0;
    for (const int64_t numel : numels) {
      total += (numel + 15) / 16 * 16;
    }
    memory_.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(total) * 4)));
    float* at = memory_.get();
    for (size_t rank = 0; rank < numels.size(); ++rank) {
      parts.push_back({static_cast<int>(rank), at, numels[rank]});
      at += (numels[rank] + 15) / 16 * 16;
    }
  }
  // Such that the order of additions shows in the bits. Pieces of one table, which begin anywhere: a number at a time
  // would be most of what a test under a sanitizer does.
  void Fill(uint32_t seed) {
    static constexpr int64_t kPeriod = 65'521;
    static const std::vector<float> table = [] {
      std::minstd_rand random(1);
      std::vector<float> values(2 * kPeriod);
      for (float& value : values) {
        value = std::ldexp(static_cast<float>(random() % 20001) - 10000.0f, static_cast<int>(random() % 24));
      }
      return values;
    }();
    std::minstd_rand random(seed * 2654435761u + 1);
    for (const NodePart& part : parts) {
      for (int64_t i = 0; i < part.numel; i += kPeriod) {
        std::copy_n(table.begin() + random() % kPeriod, std::min(kPeriod, part.numel - i), part.data + i);
      }
    }
  }
  void Set(float value) {
    for (const NodePart& part : parts) {
      std::fill_n(part.data, part.numel, value);
    }
  }
  std::vector<float> Values() const {
    std::vector<float> all;
    for (const NodePart& part : parts) {
      all.insert(all.end(), part.data, part.data + part.numel);
    }
    return all;
  }

  std::vector<NodePart> parts;

 private:
  std::unique_ptr<float, decltype(&std::free)> memory_{nullptr, &std::free};
};

// The sum in the order of nodes.
inline std::vector<float> SumOf(const std::vector<std::vector<float>>& values) {
  std::vector<float> sum = values[0];
  for (size_t node = 1; node < values.size(); ++node) {
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] += values[node][i];
    }
  }
  return sum;
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Nodes of one process with an exchange each, over queues or over the daemons' sockets.
class PeerWorld {
 public:
  static constexpr int kSlots = 2;
  PeerWorld(int nodes, bool sockets, int64_t max_numel, int64_t max_piece_numel = 0, int places = 0)
      : nodes(nodes),
        node_links_(nodes, sockets),
        max_numel_(max_numel),
        max_piece_numel_(max_piece_numel),
        places_(places) {
    for (int node = 0; node < nodes; ++node) routers.push_back(std::make_unique<Router>(nodes));
    links.resize(nodes);
    exchanges.resize(nodes);
    for (int node = 0; node < nodes; ++node) {
      Join(node);
    }
    WaitUp();
  }
  ~PeerWorld() {
    for (int node = 0; node < nodes; ++node) {
      Leave(node);
    }
  }
  void Join(int node) {
    links[node] = node_links_.Join(node, routers[node].get());
    exchanges[node] = *PeerExchange::Make(links[node].get(), max_numel_, kSlots, max_piece_numel_, places_);
    routers[node]->Set(exchanges[node].get());
  }
  void WaitUp() {
    for (int a = 0; a < nodes && node_links_.are_sockets(); ++a) {
      for (int b = 0; b < nodes; ++b) {
        ASSERT_TRUE(PollUntil([&] { return a == b || routers[a]->up(b); })) << a << " to " << b;
      }
    }
  }
  void Leave(int node) {
    routers[node]->Set(nullptr);
    exchanges[node].reset();
    links[node].reset();
    routers[node]->Forget();
  }
  void Add(int node, uint64_t generation, uint64_t sequence, Given& given) {
    exchanges[node]->AllReduce(generation, sequence, given.parts, absl::StrCat("layer.", sequence), given.Done());
  }

  void Scatter(int node, uint64_t generation, uint64_t sequence, Given& given) {
    exchanges[node]->ReduceScatter(generation, sequence, given.parts, absl::StrCat("layer.", sequence), given.Done());
  }

  const int nodes;

 private:
  NodeLinks node_links_;

 public:
  std::vector<std::unique_ptr<Router>> routers;
  std::vector<std::unique_ptr<PeerLinks>> links;
  std::vector<std::unique_ptr<PeerExchange>> exchanges;

 private:
  const int64_t max_numel_;
  const int64_t max_piece_numel_;
  const int places_;
};

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_NODES_PEER_WORLD_H_
