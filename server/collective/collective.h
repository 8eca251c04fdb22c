#ifndef SHARDD_SERVER_COLLECTIVE_COLLECTIVE_H_
#define SHARDD_SERVER_COLLECTIVE_COLLECTIVE_H_

// The second seam: moves shards and gradients between the ranks' devices. Requests name flat parameters of the plan and
// where each rank's bytes lie; an implementation decides what travels. `collective/local`: all ranks on this node, so
// nothing travels.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "server/device/device.h"

namespace shardd {

// One rank's contribution to a reduction.
struct GradientSource {
  int rank = 0;
  // Start of the group's gradient slot. The collective may write over the gradients there: they are given away.
  char* slot = nullptr;
  std::vector<bool> present;  // by index_in_group; an absent gradient is never read
};

// How the result meets what the gradient shard holds, per parameter of the group.
enum class GradientMode : uint8_t {
  kOverwrite,  // nothing valid is there: written, not zeroed first
  kAccumulate,
};

struct ReduceScatterRequest {
  const ShardPlan* plan = nullptr;  // outlives the request
  int group = 0;
  std::vector<GradientSource> sources;  // ascending ranks; added in this order
  std::vector<GradientMode> modes;      // by index_in_group; parameters present in no source are not touched
  char* gradients = nullptr;            // start of slab "gradients"; the sum goes to each of plan->gradient_copies
  // Where the gradient shards are memory of the host that devices reach by copies alone: memory of each rank's device,
  // by rank, of staging_bytes (a positive multiple of 4096), in which sums are made, a piece at a time. Ranks of one
  // device may share it: the stream keeps the order. Empty: sums are made in place.
  std::vector<char*> staging;
  int64_t staging_bytes = 0;
  int gradients_file = -1;                     // of the slab, where trainers give its pages back (ReduceOp.dst_file)
  DType reduce_dtype = v1::DTYPE_UNSPECIFIED;  // that of the sources
  float scale = 1;                             // 1 / divide factor
  bool keep_low_precision = false;             // gradients are of reduce_dtype, not of their parameter's
  std::string label;
  // By rank, or empty: of the gradient shards, before the rank's sums. Only for a collective that may_hold_requests:
  // others are given them as work of the ranks' devices.
  std::vector<std::vector<DeviceOp>> zeros;
  // Several nodes (collective/nodes): which sum this is on all of them, and what it comes of. `sources` may be empty,
  // where only other nodes give; `modes` are those of what any node gives.
  struct NodeSum {
    uint64_t generation = 0;    // of the nodes' common attempt; a later one ends what is under way of earlier ones
    uint64_t sequence = 0;      // from 0 in each generation, without gaps, the same on all nodes
    std::vector<bool> present;  // by index_in_group: given by some node
  };
  std::optional<NodeSum> nodes;
};

struct AllGatherRequest {
  const ShardPlan* plan = nullptr;
  int group = 0;
  const char* shards = nullptr;  // start of slab "shards"
  char* destination = nullptr;   // start of an unsharded-pool slot; receives the group's image in unsharded_dtype
  // The rank whose device does all of it: where the slot is memory of that device, others' would have to write there,
  // and its own reads theirs as fast. -1: spread over all devices.
  int reader = -1;
  // Where within slab "shards" memory of another device begins, ascending, in bytes: no copy out of it crosses it.
  std::vector<int64_t> boundaries;
  std::string label;
  // Start of slab "parameters", where flat parameters that lie in it are copied from; null: the plan has none there.
  const char* parameters = nullptr;
};

class DeviceSlab;
class TrainerCollective;

// Thread-safe. `done` runs once, on a thread of a device, with the first error.
class Collective {
 public:
  using Done = std::function<void(absl::Status)>;
  virtual ~Collective() = default;
  virtual const char* name() const = 0;  // "local", "nccl"
  // What status says: who adds, and why not another.
  virtual std::string Describe() const = 0;
  // Runs on `post_backward` of every rank's device: rank r's device writes rank r's work segments. Needs no pairing by
  // the callee: the caller has all sources.
  virtual void ReduceScatter(ReduceScatterRequest request, Done done) = 0;
  // Runs on `unshard`, spread over all devices or on the reader's.
  virtual void AllGather(AllGatherRequest request, Done done) = 0;
  // Where the rank's gradient slots lie from now on, on its device; null: it has none. Requests name memory of slabs
  // that were told, or none were. What needs to know keeps them for as long as it does.
  virtual void SetSlots(int /*rank*/, std::shared_ptr<const DeviceSlab> /*slots*/) {}
  // Not null: sums are made by ranks' sessions, which it is to be told of.
  virtual TrainerCollective* trainers() { return nullptr; }
  // A reduction may reach its devices later than ReduceScatter returns, or is not theirs at all. So what is submitted
  // to them behind it is in no order with it: who needs one waits for `done`, or sends it along (`zeros`).
  virtual bool may_hold_requests() const { return false; }
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_COLLECTIVE_H_
