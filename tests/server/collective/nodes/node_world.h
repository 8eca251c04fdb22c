#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_NODES_NODE_WORLD_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_NODES_NODE_WORLD_H_

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "server/collective/nodes/node_collective.h"
#include "server/device/devices.h"
#include "tests/server/collective/collective_fixture.h"
#include "tests/server/collective/nodes/node_switch.h"

namespace shardd {

// The collective of several nodes where there is but one: requests of others, each named as the next sum.
class OneNode final : public Collective {
 public:
  explicit OneNode(const std::vector<Device*>& of_ranks) : switch_(1, /*seed=*/3) {
    std::vector<char*> staging;
    for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
      staging_.emplace_back(kNodeSlots * kSlotBytes, 0xff);
    }
    for (Bytes& of_rank : staging_) staging.push_back(of_rank.data());
    inner_ = std::make_unique<NodeCollective>(of_ranks, switch_.Exchange(0), std::move(staging), kSlotBytes);
  }
  const char* name() const override { return inner_->name(); }
  std::string Describe() const override { return inner_->Describe(); }
  void ReduceScatter(ReduceScatterRequest request, Done done) override {
    request.nodes = ReduceScatterRequest::NodeSum{1, sequence_.load(), {}};
    std::vector<bool>& present = request.nodes->present;
    present.resize(request.modes.size());
    for (const GradientSource& source : request.sources) {
      for (size_t i = 0; i < std::min(present.size(), source.present.size()); ++i) {
        present[i] = present[i] || source.present[i];
      }
    }
    inner_->ReduceScatter(std::move(request), [this, done = std::move(done)](absl::Status status) {
      if (!absl::IsInvalidArgument(status)) ++sequence_;  // the suite waits for each
      done(std::move(status));
    });
  }
  void AllGather(AllGatherRequest request, Done done) override {
    inner_->AllGather(std::move(request), std::move(done));
  }
  bool may_hold_requests() const override { return inner_->may_hold_requests(); }

 private:
  static constexpr int64_t kSlotBytes = 1 << 20;
  NodeSwitch switch_;
  std::vector<Bytes> staging_;
  std::unique_ptr<NodeCollective> inner_;
  std::atomic<uint64_t> sequence_ = 0;
};

class NodeWorld final : public CollectiveWorld {
 public:
  explicit NodeWorld(int devices) : devices_(devices) {}
  std::vector<std::unique_ptr<Device>> MakeDevices() override {
    return std::move(shardd::MakeDevices(absl::StrCat("cpu:", devices_))->devices);
  }
  std::unique_ptr<Collective> Make(std::vector<Device*> of_ranks) override {
    return std::make_unique<OneNode>(of_ranks);
  }

 private:
  const int devices_;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_NODES_NODE_WORLD_H_
