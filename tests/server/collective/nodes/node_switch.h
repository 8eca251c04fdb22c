#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_NODES_NODE_SWITCH_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_NODES_NODE_SWITCH_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/collective/nodes/node_exchange.h"

namespace shardd {

// Where the nodes of one process meet: adds, in the order of nodes, what all of them have given, on a thread of its
// own. What is asked of callers of an exchange it expects. Sums that are there at a time end in any order.
class NodeSwitch {
 public:
  NodeSwitch(int nodes, uint32_t seed)
      : nodes_(static_cast<size_t>(nodes)), random_(seed), thread_([this] { Run(); }) {}
  ~NodeSwitch() {
    {
      absl::MutexLock lock(&mutex_);
      stops_ = true;
    }
    thread_.join();
  }
  // Of each node, one; the switch outlives it.
  std::shared_ptr<NodeExchange> Exchange(int node) { return std::make_shared<OfNode>(this, static_cast<size_t>(node)); }

  // Nothing is added as long as it holds; generations end.
  void Hold(bool holds) {
    absl::MutexLock lock(&mutex_);
    holds_ = holds;
  }
  // Sums of generations that are over are made, as where all nodes had said everything before.
  void IgnoreBegin() {
    absl::MutexLock lock(&mutex_);
    ignores_begin_ = true;
  }
  // The sum of that number fails, on all nodes, and so do those behind it on each as they come.
  void FailAt(uint64_t sequence, absl::Status status) {
    absl::MutexLock lock(&mutex_);
    failures_[sequence] = std::move(status);
  }
  void FailNoMore() {
    absl::MutexLock lock(&mutex_);
    failures_.clear();
  }
  // (generation, sequence) of the node's calls so far.
  std::vector<std::pair<uint64_t, uint64_t>> calls(int node) const {
    absl::MutexLock lock(&mutex_);
    return nodes_[static_cast<size_t>(node)].calls;
  }
  void AwaitCalls(int node, size_t count) const {
    const auto there = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return nodes_[static_cast<size_t>(node)].calls.size() >= count;
    };
    absl::MutexLock lock(&mutex_);
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&there), absl::Seconds(60))) << "node " << node;
  }
  int out_of_order() const {
    absl::MutexLock lock(&mutex_);
    return out_of_order_;
  }

 private:
  struct Given {
    std::vector<NodePart> parts;
    NodeExchange::Done done;
  };
  using Sum = std::map<size_t, Given>;  // by node
  struct Node {
    uint64_t generation = 0;
    std::vector<std::pair<uint64_t, uint64_t>> calls;
    int under_way = 0;
  };

  class OfNode final : public NodeExchange {
   public:
    OfNode(NodeSwitch* of, size_t node) : of_(of), node_(node) {}
    ~OfNode() override { of_->EndAll(node_); }
    const char* name() const override { return "switch"; }
    std::string Describe() const override { return absl::StrCat("node ", node_, " of a test"); }
    void AllReduce(uint64_t generation, uint64_t sequence, std::vector<NodePart> parts, std::string /*label*/,
                   Done done) override {
      of_->Give(node_, generation, sequence, {std::move(parts), std::move(done)});
    }
    void Begin(uint64_t generation) override { of_->Begin(node_, generation); }
    void OnMessage(int /*node*/, const v1::PeerMessage::Exchange& /*message*/) override {}

   private:
    NodeSwitch* const of_;
    const size_t node_;
  };

  void Give(size_t node, uint64_t generation, uint64_t sequence, Given given) {
    absl::MutexLock lock(&mutex_);
    Node& of = nodes_[node];
    const bool follows = !of.calls.empty() && of.calls.back().first == generation;
    EXPECT_EQ(sequence, follows ? of.calls.back().second + 1 : 0) << "node " << node;
    EXPECT_EQ(of.generation, generation) << "was not begun";
    of.calls.emplace_back(generation, sequence);
    ++of.under_way;
    int rank = -1;
    for (const NodePart& part : given.parts) {
      EXPECT_GT(part.rank, rank);
      rank = part.rank;
      EXPECT_EQ(reinterpret_cast<uintptr_t>(part.data) % 64, 0u);
      EXPECT_GT(part.numel, 0);
      EXPECT_TRUE(std::all_of(part.data, part.data + part.numel, [](float x) { return std::isfinite(x); }));
    }
    sums_[{generation, sequence}][node] = std::move(given);
  }
  void Begin(size_t node, uint64_t generation) {
    absl::MutexLock lock(&mutex_);
    EXPECT_GT(generation, nodes_[node].generation);
    nodes_[node].generation = generation;
    if (!ignores_begin_) EndBefore(node, generation);
  }
  void EndBefore(size_t node, uint64_t generation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (auto& [key, sum] : sums_) {
      if (key.first >= generation || !sum.contains(node)) continue;
      ended_.emplace_back(node, std::move(sum.at(node).done));
      sum.erase(node);
    }
  }
  void EndAll(size_t node) {
    const auto ended = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return nodes_[node].under_way == 0; };
    absl::MutexLock lock(&mutex_);
    EndBefore(node, UINT64_MAX);
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&ended), absl::Seconds(60)));
  }

  absl::Status FailureOf(uint64_t sequence) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return failures_.empty() || sequence < failures_.begin()->first ? absl::OkStatus() : failures_.begin()->second;
  }
  std::vector<std::pair<uint64_t, uint64_t>> Ready() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    std::vector<std::pair<uint64_t, uint64_t>> ready;
    for (const auto& [key, sum] : sums_) {
      const bool fails = !FailureOf(key.second).ok();
      if (!holds_ && (sum.size() == nodes_.size() || (fails && !sum.empty()))) ready.push_back(key);
    }
    return ready;
  }
  void Run() {
    const auto due = [this]()
                         ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stops_ || !ended_.empty() || !Ready().empty(); };
    const auto several = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stops_ || Ready().size() > 1; };
    mutex_.Lock();
    for (;;) {
      mutex_.Await(absl::Condition(&due));
      if (stops_) break;
      if (!ended_.empty()) {
        auto [node, done] = std::move(ended_.back());
        ended_.pop_back();
        End(node, std::move(done), absl::AbortedError("the generation was ended"));
        continue;
      }
      if (random_() % 2 == 0) mutex_.AwaitWithTimeout(absl::Condition(&several), absl::Milliseconds(2));
      const auto ready = Ready();
      if (ready.empty()) continue;
      const auto key = ready[random_() % ready.size()];
      out_of_order_ += key == ready.front() ? 0 : 1;
      Sum sum = std::move(sums_.at(key));
      sums_.erase(key);
      const absl::Status status = FailureOf(key.second);
      if (status.ok()) Add(sum);
      std::vector<size_t> order;
      for (const auto& [node, given] : sum) order.push_back(node);
      std::shuffle(order.begin(), order.end(), random_);
      for (const size_t node : order) End(node, std::move(sum.at(node).done), status);
    }
    mutex_.Unlock();
  }
  // Without the lock meanwhile.
  void End(size_t node, NodeExchange::Done done, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    mutex_.Unlock();
    done(status);
    done = nullptr;
    mutex_.Lock();
    --nodes_[node].under_way;
  }
  static void Add(const Sum& sum) {
    const std::vector<NodePart>& first = sum.begin()->second.parts;
    for (const auto& [node, given] : sum) {
      ASSERT_EQ(given.parts.size(), first.size()) << "node " << node;
      for (size_t i = 0; i < first.size(); ++i) {
        ASSERT_EQ(given.parts[i].rank, first[i].rank) << "node " << node;
        ASSERT_EQ(given.parts[i].numel, first[i].numel) << "node " << node;
        if (given.parts[i].data == first[i].data) continue;
        for (int64_t k = 0; k < first[i].numel; ++k) first[i].data[k] += given.parts[i].data[k];
      }
    }
    for (const auto& [node, given] : sum) {
      for (size_t i = 0; i < first.size(); ++i) {
        std::copy_n(first[i].data, given.parts[i].data == first[i].data ? 0 : first[i].numel, given.parts[i].data);
      }
    }
  }

  mutable absl::Mutex mutex_;
  std::vector<Node> nodes_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<uint64_t, uint64_t>, Sum> sums_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<size_t, NodeExchange::Done>> ended_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, absl::Status> failures_ ABSL_GUARDED_BY(mutex_);
  std::mt19937 random_ ABSL_GUARDED_BY(mutex_);
  int out_of_order_ ABSL_GUARDED_BY(mutex_) = 0;
  bool holds_ ABSL_GUARDED_BY(mutex_) = false;
  bool ignores_begin_ ABSL_GUARDED_BY(mutex_) = false;
  bool stops_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // the last member: it runs at once
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_NODES_NODE_SWITCH_H_
