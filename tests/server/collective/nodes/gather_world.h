#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_NODES_GATHER_WORLD_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_NODES_GATHER_WORLD_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <memory_resource>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/plan/node_part.h"
#include "common/tensor/kernels.h"
#include "server/collective/nodes/links/peer_gather.h"
#include "server/job/wait.h"
#include "tests/common/plan/node_specs.h"
#include "tests/server/collective/nodes/call_result.h"
#include "tests/server/collective/nodes/gather_gpus.h"
#include "tests/server/collective/nodes/node_links.h"
#include "tests/testing/float8_reference.h"
#include "tests/testing/poll.h"

namespace shardd::testing {

inline constexpr char kUntouched = '\xee';

// root(w, ids) { block(w, bias, frozen), tiny(w), large(w) }, with parts that are uneven, and of "tiny" empty but one.
// `row`: the nodes of one; 0: all are. `float8`: MixedPrecision.float8_gathers.
inline v1::JobSpec GatherSpec(int nodes, v1::Layout layout, DType param_dtype, int row = 0, bool float8 = false) {
  SpecBuilder b(/*world_size=*/2);
  b.config().set_strategy(row > 0 ? v1::STRATEGY_HYBRID_SHARD : v1::STRATEGY_FULL_SHARD);
  b.config().set_shard_group_size(2 * row);
  b.config().set_layout(layout);
  b.config().mutable_mixed_precision()->set_param_dtype(param_dtype);
  b.config().mutable_mixed_precision()->set_float8_gathers(float8);
  AddNodes(&b, nodes);
  b.Param(0, "w", {37});
  b.Param(0, "ids", {41}, {.dtype = v1::DTYPE_INT64, .requires_grad = false});
  const int block = b.AddSharded(0, "block");
  b.Param(block, "w", {61, 257});
  b.Param(block, "bias", {7});
  b.Param(block, "frozen", {1001}, {.requires_grad = false});
  b.Param(b.AddSharded(0, "tiny"), "w", {1});
  b.Param(b.AddSharded(0, "large"), "w", {701, 1001});
  return b.spec();
}

// A call of Gather, and the image that it writes to.
class Gathered : public CallResult {
 public:
  explicit Gathered(int64_t image_bytes, std::pmr::memory_resource* memory = std::pmr::new_delete_resource())
      : image(static_cast<size_t>(image_bytes), kUntouched, memory) {}
  std::pmr::string image;
};

// One node: its plan, what it holds of the slab, and its gathers.
class GatherNode final : public PeerLinks::Events {
 public:
  // `gpus`: it gathers by these, and what it has lies there; else by its links.
  GatherNode(const v1::JobSpec& spec, int node, GatherGpus* gpus = nullptr)
      : plan(std::make_shared<ShardPlan>(*PlanShards(spec, node))),
        number(node),
        memory_(gpus == nullptr ? std::pmr::new_delete_resource() : gpus->memory()),
        shards(memory_),
        gpus_(gpus) {
    shards.assign(static_cast<size_t>(plan->memory.shards_bytes), '\xdd');
    up_.resize(static_cast<size_t>(plan->nodes()));
  }
  void Start(PeerLinks* links) {
    std::unique_ptr<NodeGather> made = gpus_ != nullptr ? gpus_->Make(plan, number, links, shards.data())
                                                        : std::make_unique<PeerGather>(plan, links, shards.data());
    absl::MutexLock lock(&mutex_);
    gather_ = std::move(made);
    for (size_t node = 0; node < up_.size(); ++node) {
      if (up_[node]) gather_->OnUp(static_cast<int>(node));
    }
  }
  void Stop() {
    std::unique_ptr<NodeGather> gone;
    {
      absl::MutexLock lock(&mutex_);
      gone = std::move(gather_);
    }
    gone.reset();
    if (gpus_ != nullptr) gpus_->Stopped(number);
  }
  void Forget() {  // no event says that links have gone with their owner
    absl::MutexLock lock(&mutex_);
    up_.assign(up_.size(), false);
  }
  bool up(int node) const {
    absl::MutexLock lock(&mutex_);
    return up_[static_cast<size_t>(node)];
  }
  NodeGather* operator->() const {
    absl::MutexLock lock(&mutex_);
    return gather_.get();
  }

  // Writes what this node holds of all groups at `version`, and nothing else.
  void Write(uint64_t version) {
    for (size_t f = 0; f < plan->flat_params.size(); ++f) {
      const FlatParamPlan& flat = plan->flat_params[f];
      for (int rank = 0; rank < plan->world_size; ++rank) {
        for (const Segment& segment : WorkSegments(*plan, static_cast<int>(f), rank)) {
          const int64_t element_bytes = DTypeSizeBytes(flat.dtype);
          char* to = shards.data() + flat.shards_offset_bytes + segment.offset * element_bytes;
          for (int64_t i = 0; i < segment.numel; ++i) {
            PutValue(flat.dtype, version, f, segment.offset + i, to + i * element_bytes);
          }
        }
      }
    }
  }
  void SetVersion(uint64_t version) {
    (*this)->SetReadable(0);
    Write(version);
    (*this)->SetReadable(version);
  }
  std::unique_ptr<Gathered> Ask(uint64_t generation, int group, uint64_t version) {
    auto gathered = std::make_unique<Gathered>(plan->groups[static_cast<size_t>(group)].unsharded_bytes, memory_);
    (*this)->Gather(generation, group, version, gathered->image.data(), absl::StrCat("group ", group),
                    gathered->Done());
    return gathered;
  }
  // The other nodes' elements are those of the version, in unsharded_dtype, through float8 if that is asked for; all
  // else is as it was.
  void Check(const Gathered& gathered, int group, uint64_t version) const {
    std::string want(gathered.image.size(), kUntouched);
    for (const int f : plan->groups[static_cast<size_t>(group)].flat_params) {
      const FlatParamPlan& flat = plan->flat_params[static_cast<size_t>(f)];
      if (IsFloatingPoint(flat.dtype) && plan->config.mixed_precision().float8_gathers()) {
        WantFloat8(f, version, want.data() + flat.pool_offset_bytes);
        continue;
      }
      std::vector<bool> own(static_cast<size_t>(flat.padded_numel));
      for (int rank = 0; rank < plan->world_size; ++rank) {
        for (const Segment& segment : WorkSegments(*plan, f, rank)) {
          std::fill_n(own.begin() + segment.offset, segment.numel, true);
        }
      }
      for (int64_t i = 0; i < flat.numel; ++i) {
        if (plan->ParamAt(f, i) < 0 || own[static_cast<size_t>(i)]) continue;
        char stored[8];
        PutValue(flat.dtype, version, static_cast<size_t>(f), i, stored);
        Cast(stored, flat.dtype, want.data() + flat.pool_offset_bytes + i * DTypeSizeBytes(flat.unsharded_dtype),
             flat.unsharded_dtype, 1);
      }
    }
    const auto [got, wanted] = std::mismatch(gathered.image.begin(), gathered.image.end(), want.begin());
    EXPECT_TRUE(got == gathered.image.end())
        << "node " << plan->node << ", group " << group << ", version " << version << ": byte "
        << got - gathered.image.begin() << " of " << gathered.image.size();
  }

  absl::Status CheckHello(int, const v1::PeerHello&) override { return absl::OkStatus(); }
  void OnUp(int node) override {
    absl::MutexLock lock(&mutex_);
    up_[static_cast<size_t>(node)] = true;
    if (gather_ != nullptr) gather_->OnUp(node);
  }
  void OnDown(int node, absl::Status why) override {
    absl::MutexLock lock(&mutex_);
    up_[static_cast<size_t>(node)] = false;
    if (gather_ != nullptr) gather_->OnDown(node, why);
  }
  void OnMessage(int node, v1::PeerMessage message, PeerReceipt /*receipt*/) override {
    if (gpus_ != nullptr && message.has_exchange()) return gpus_->OnMessage(number, node, message.exchange());
    absl::ReaderMutexLock lock(&mutex_);
    if (gather_ != nullptr && message.has_pull()) gather_->OnPull(node, message);
  }
  void OnData(int node, const v1::PeerData& header, absl::string_view elements) override {
    absl::ReaderMutexLock lock(&mutex_);
    if (gather_ != nullptr && header.slab() == v1::SLAB_UNSHARDED) gather_->OnData(node, header, elements);
  }

  const std::shared_ptr<const ShardPlan> plan;
  const int number;  // of all nodes

 private:
  std::pmr::memory_resource* const memory_;

 public:
  std::pmr::string shards;

 private:
  // What the other nodes hold of a flat parameter, each node's part of each parameter in blocks of its own.
  void WantFloat8(int flat_param, uint64_t version, char* want) const {
    const FlatParamPlan& flat = plan->flat_params[static_cast<size_t>(flat_param)];
    for (int other = 0; other < NodesOfRow(*plan); ++other) {
      for (const int p : flat.params) {
        const ParamRange range = NodeRangeOf(*plan, p, other);
        const int64_t first = plan->params[static_cast<size_t>(p)].offset + range.first;
        if (other == plan->node) continue;
        std::vector<float> values(static_cast<size_t>(range.numel));
        for (int64_t i = 0; i < range.numel; ++i) {
          float stored = 0;
          char read[4];
          PutValue(flat.dtype, version, static_cast<size_t>(flat_param), first + i, reinterpret_cast<char*>(&stored));
          Cast(&stored, flat.dtype, read, flat.unsharded_dtype, 1);
          Cast(read, flat.unsharded_dtype, &values[static_cast<size_t>(i)], v1::DTYPE_FLOAT32, 1);
        }
        RoundToFloat8(values.data(), range.numel);
        Cast(values.data(), v1::DTYPE_FLOAT32, want + first * DTypeSizeBytes(flat.unsharded_dtype),
             flat.unsharded_dtype, range.numel);
      }
    }
  }
  // Another one for each version, flat parameter and element.
  static void PutValue(DType dtype, uint64_t version, size_t flat_param, int64_t element, char* to) {
    const uint64_t mixed = (version * 1'000'003 + flat_param * 7919 + static_cast<uint64_t>(element)) * 2654435761u;
    if (dtype == v1::DTYPE_FLOAT32) {
      const float value = static_cast<float>(static_cast<int64_t>(mixed >> 8 & 0xffffff) - 0x800000) / 4096;
      memcpy(to, &value, sizeof(value));
    } else {
      memcpy(to, &mixed, static_cast<size_t>(DTypeSizeBytes(dtype)));
    }
  }

  GatherGpus* const gpus_;
  mutable absl::Mutex mutex_;
  std::vector<bool> up_;
  std::unique_ptr<NodeGather> gather_;
};

// Nodes that are linked by queues of this process, or by sockets; with `gpus` they gather by NCCL.
class GatherWorld {
 public:
  GatherWorld(const v1::JobSpec& spec, bool sockets, bool gpus = false)
      : nodes(spec.config().nodes().addresses_size()),
        gpus_(gpus ? std::make_unique<GatherGpus>(nodes) : nullptr),
        node_links_(nodes, sockets) {
    for (int i = 0; i < nodes; ++i) node.push_back(std::make_unique<GatherNode>(spec, i, gpus_.get()));
    links.resize(static_cast<size_t>(nodes));
    for (int i = 0; i < nodes; ++i) {
      Join(i);
    }
    WaitUp();
  }
  ~GatherWorld() {
    for (int i = 0; i < nodes; ++i) {
      Leave(i);
    }
  }
  void Join(int i) {
    links[i] = node_links_.Join(i, node[i].get());
    node[i]->Start(links[i].get());
  }
  void WaitUp() {
    for (int a = 0; a < nodes; ++a) {
      for (int b = 0; b < nodes; ++b) {
        ASSERT_TRUE(PollUntil([&] { return a == b || node[a]->up(b); })) << a << " to " << b;
      }
    }
  }
  void Leave(int i) {
    node[i]->Stop();
    links[i].reset();
    node[i]->Forget();
  }

  const int nodes;

 private:
  const std::unique_ptr<GatherGpus> gpus_;  // outlives the nodes
  NodeLinks node_links_;

 public:
  std::vector<std::unique_ptr<GatherNode>> node;
  std::vector<std::unique_ptr<PeerLinks>> links;
};

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_NODES_GATHER_WORLD_H_
