#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_NODES_NODE_COLLECTIVE_FIXTURE_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_NODES_NODE_COLLECTIVE_FIXTURE_H_

// The nodes of a job in one process, each with devices, slabs and a collective of its own, against one collective over
// all their ranks.

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <memory_resource>
#include <string>
#include <utility>
#include <vector>

#include "server/collective/nodes/node_collective.h"
#include "server/device/devices.h"
#include "server/job/wait.h"
#include "tests/common/plan/node_specs.h"
#include "tests/server/collective/collective_fixture.h"
#include "tests/server/collective/nodes/node_switch.h"
#include "tests/server/device/fake_cuda_world.h"

namespace shardd {

struct NodeDeviceKind {
  const char* name;
  bool is_cuda;
  friend void PrintTo(const NodeDeviceKind& kind, std::ostream* out) { *out << kind.name; }
};

// Who gives what to one sum, and how: [node][rank][index in group].
struct Given {
  int group = 0;
  std::vector<std::vector<std::vector<bool>>> present;
  std::vector<GradientMode> modes;
  float scale = 0.5f;
  DType reduce_dtype = v1::DTYPE_UNSPECIFIED;
  bool keep_low_precision = false;
  int seed = 100;
  bool odd_values = false;  // whose sums are rounded
};

class NodeCollectiveTest : public ::testing::TestWithParam<NodeDeviceKind> {
 protected:
  static constexpr absl::Duration kLimit = absl::Seconds(60);
  static constexpr int kDevices = 2;  // of a node; ranks share them

  struct Node {
    std::vector<std::unique_ptr<WrappedDevice>> devices;
    std::vector<Bytes> staging;
    std::vector<char*> staging_at;
    std::unique_ptr<Bytes> gradients;
    std::unique_ptr<NodeCollective> collective;
  };

  // `model` is of one node's ranks.
  void Start(SpecBuilder model, int nodes) {
    Stop();
    SpecBuilder all = model;
    all.spec().set_world_size(model.spec().world_size() * nodes);
    all.config().clear_shard_group_size();
    all.config().clear_replica_copies();
    reference_ = all.Plan();
    AddNodes(&model, nodes);
    plan_ = model.Plan();
    switch_ = std::make_unique<NodeSwitch>(nodes, /*seed=*/7);
    if (GetParam().is_cuda) {
      gpus_ = std::make_unique<FakeCudaWorld>(/*delay_seed=*/5, nodes * kDevices);
      BytesMemory() = gpus_->memory();
      devices_ = gpus_->MakeAll();
    } else {
      devices_ = std::move(MakeDevices(absl::StrCat("cpu:", nodes * kDevices))->devices);
    }
    for (int node = 0; node < nodes; ++node) AddNode(node);
    reference_gradients_ = std::make_unique<Bytes>(reference_.memory.gradients_bytes, 0xff);
    generation_ = 1;
    sequence_ = 0;
    for (Node& node : nodes_) node.collective->Begin(generation_);
  }
  void AddNode(int number) {
    Node& node = nodes_.emplace_back();
    std::vector<Device*> of_ranks;
    for (int device = 0; device < kDevices; ++device) {
      node.devices.push_back(
          std::make_unique<WrappedDevice>(devices_[static_cast<size_t>(number * kDevices + device)].get()));
    }
    for (int rank = 0; rank < plan_.world_size; ++rank) {
      of_ranks.push_back(node.devices[static_cast<size_t>(rank % kDevices)].get());
      node.staging.emplace_back(plan_.staging_bytes, 0xff);
    }
    for (Bytes& staging : node.staging) node.staging_at.push_back(staging.data());
    node.gradients = std::make_unique<Bytes>(plan_.memory.gradients_bytes, 0xff);
    node.collective = std::make_unique<NodeCollective>(std::move(of_ranks), switch_->Exchange(number), node.staging_at,
                                                       plan_.node_slot_bytes);
  }
  void Stop() {
    for (Node& node : nodes_) node.collective.reset();
    Wait();  // what is under way names memory of the nodes
    nodes_.clear();
    reference_gradients_.reset();
    pending_.clear();
    devices_.clear();
    switch_.reset();
    BytesMemory() = std::pmr::new_delete_resource();
    gpus_.reset();
  }
  void TearDown() override { Stop(); }

  int Group(const char* name) const { return plan_.FindGroup(name); }
  int Index(const char* fqn) const { return plan_.params[static_cast<size_t>(plan_.FindParam(fqn))].index_in_group; }
  std::vector<bool> Mask(int group, bool value) const {
    std::vector<bool> mask;
    for (const int param : plan_.groups[static_cast<size_t>(group)].params) {
      mask.push_back(value && plan_.params[static_cast<size_t>(param)].requires_grad);
    }
    return mask;
  }
  // Of all ranks of all nodes.
  Given Everything(int group, GradientMode mode = GradientMode::kOverwrite, int seed = 100) const {
    Given given;
    given.group = group;
    const std::vector<std::vector<bool>> of_node(static_cast<size_t>(plan_.world_size), Mask(group, true));
    given.present.assign(nodes_.size(), of_node);
    given.modes.assign(plan_.groups[static_cast<size_t>(group)].params.size(), mode);
    given.seed = seed;
    return given;
  }
  static std::vector<bool> Union(const Given& given) {
    std::vector<bool> present(given.modes.size(), false);
    for (const auto& node : given.present) {
      for (const auto& rank : node) {
        for (size_t i = 0; i < present.size(); ++i) present[i] = present[i] || rank[i];
      }
    }
    return present;
  }

  // What a rank of all nodes' gives.
  static std::vector<float> Values(const ShardPlan& plan, const Given& given, int param, int rank) {
    std::vector<float> values = ParamValues(plan, param, given.seed + rank);
    for (float& x : values) x = given.odd_values ? x * 0.1f + 1e-3f * static_cast<float>(rank) : x;
    return values;
  }
  // A rank's slot, NaN but for what it gives.
  static Bytes Slot(const ShardPlan& plan, const Given& given, const std::vector<bool>& present, int rank) {
    const GroupPlan& group = plan.groups[static_cast<size_t>(given.group)];
    Bytes slot(group.gradient_bytes, 0xff);
    for (size_t i = 0; i < group.params.size(); ++i) {
      if (present[i]) WriteSlot(plan, slot, group.params[i], Values(plan, given, group.params[i], rank));
    }
    return slot;
  }
  // All that one node's request has of its own until it is done.
  struct Pending {
    std::deque<Bytes> slots;
    absl::Notification done;
    absl::Status status;
  };
  ReduceScatterRequest Request(size_t node, const Given& given, Pending& pending) {
    ReduceScatterRequest request = RequestOf(plan_, given, *nodes_[node].gradients);
    for (int rank = 0; rank < plan_.world_size; ++rank) {
      const std::vector<bool>& present = given.present[node][static_cast<size_t>(rank)];
      if (std::find(present.begin(), present.end(), true) == present.end()) continue;
      pending.slots.push_back(Slot(plan_, given, present, static_cast<int>(node) * plan_.world_size + rank));
      request.sources.push_back({rank, pending.slots.back().data(), present});
    }
    request.nodes = ReduceScatterRequest::NodeSum{generation_, sequence_, Union(given)};
    return request;
  }
  static ReduceScatterRequest RequestOf(const ShardPlan& plan, const Given& given, Bytes& gradients) {
    ReduceScatterRequest request;
    request.plan = &plan;
    request.group = given.group;
    request.modes = given.modes;
    request.gradients = gradients.data();
    request.reduce_dtype = given.reduce_dtype;
    request.scale = given.scale;
    request.keep_low_precision = given.keep_low_precision;
    request.label = "reduce";
    return request;
  }
  Pending* Submit(size_t node, ReduceScatterRequest request, std::shared_ptr<Pending> pending) {
    Pending* const at = pending.get();
    pending_.push_back(pending);
    nodes_[node].collective->ReduceScatter(std::move(request), [pending](absl::Status status) {
      pending->status = std::move(status);
      pending->done.Notify();  // dies where it is called twice
    });
    return at;
  }
  // On all nodes, as the next sum. By node.
  std::vector<Pending*> Submit(const Given& given) {
    std::vector<Pending*> of_nodes;
    for (size_t node = 0; node < nodes_.size(); ++node) {
      auto pending = std::make_shared<Pending>();
      ReduceScatterRequest request = Request(node, given, *pending);
      of_nodes.push_back(Submit(node, std::move(request), pending));
    }
    ++sequence_;
    return of_nodes;
  }
  absl::Status Await(Pending* pending) {
    EXPECT_TRUE(pending->done.WaitForNotificationWithTimeout(kLimit));
    return pending->done.HasBeenNotified() ? pending->status : absl::DeadlineExceededError("not done");
  }
  // For all that was submitted.
  void Wait() {
    for (const auto& pending : pending_) (void)Await(pending.get());
  }
  void Begin() {
    ++generation_;
    sequence_ = 0;
    for (Node& node : nodes_) node.collective->Begin(generation_);
  }

  // The same sum by one collective over the ranks of all nodes.
  void Refer(const Given& given) {
    LocalCollective local(std::vector<Device*>(static_cast<size_t>(reference_.world_size), devices_[0].get()));
    ReduceScatterRequest request = RequestOf(reference_, given, *reference_gradients_);
    std::deque<Bytes> slots;
    for (int rank = 0; rank < reference_.world_size; ++rank) {
      const auto node = static_cast<size_t>(rank / plan_.world_size);
      const std::vector<bool>& present = given.present[node][static_cast<size_t>(rank % plan_.world_size)];
      slots.push_back(Slot(reference_, given, present, rank));
      request.sources.push_back({rank, slots.back().data(), present});
    }
    absl::Notification done;
    local.ReduceScatter(std::move(request), [&](const absl::Status& status) {
      EXPECT_TRUE(status.ok()) << status;
      done.Notify();
    });
    done.WaitForNotification();
  }
  // On all nodes, in every copy: what the reference has of these groups, bit by bit, and all else as it was at first.
  void ExpectAsReferred(const std::vector<Given>& sums) {
    Bytes want(plan_.gradients_stride_bytes, 0xff);
    for (const Given& given : sums) {
      const std::vector<bool> present = Union(given);
      for (size_t i = 0; i < present.size(); ++i) {
        const int param = plan_.groups[static_cast<size_t>(given.group)].params[i];
        if (present[i]) WriteGradient(plan_, want, param, ReadGradient(reference_, *reference_gradients_, param));
      }
    }
    for (size_t node = 0; node < nodes_.size(); ++node) {
      for (int copy = 0; copy < plan_.gradient_copies; ++copy) {
        EXPECT_EQ(std::memcmp(nodes_[node].gradients->data() + copy * plan_.gradients_stride_bytes, want.data(),
                              static_cast<size_t>(plan_.gradients_stride_bytes)),
                  0)
            << "node " << node << " copy " << copy;
      }
    }
  }
  void ExpectUntouched() {
    for (const Node& node : nodes_) EXPECT_TRUE(*node.gradients == Bytes(plan_.memory.gradients_bytes, 0xff));
  }
  // One after the other, on all nodes and by the reference.
  void Check(const std::vector<Given>& sums) {
    for (const Given& given : sums) {
      Refer(given);
      for (Pending* pending : Submit(given)) EXPECT_TRUE(Await(pending).ok()) << pending->status;
    }
    ExpectAsReferred(sums);
  }

  ShardPlan plan_, reference_;
  std::unique_ptr<FakeCudaWorld> gpus_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::unique_ptr<NodeSwitch> switch_;
  std::vector<Node> nodes_;
  std::unique_ptr<Bytes> reference_gradients_;
  std::deque<std::shared_ptr<Pending>> pending_;
  uint64_t generation_ = 1, sequence_ = 0;
};

#define SHARDD_FOR_EACH_NODE_DEVICE(suite)                                                               \
  INSTANTIATE_TEST_SUITE_P(                                                                              \
      Devices, suite, ::testing::Values(NodeDeviceKind{"cpu", false}, NodeDeviceKind{"fakeCuda", true}), \
      [](const ::testing::TestParamInfo<NodeDeviceKind>& info) { return std::string(info.param.name); })

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_NODES_NODE_COLLECTIVE_FIXTURE_H_
