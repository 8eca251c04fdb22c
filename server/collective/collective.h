#ifndef SHARDD_SERVER_COLLECTIVE_COLLECTIVE_H_
#define SHARDD_SERVER_COLLECTIVE_COLLECTIVE_H_

// The second seam: moves shards and gradients between the ranks' devices. Requests name flat parameters of the plan and
// where each rank's bytes are; an implementation decides what travels. In `collective/local` all ranks are on this
// node, so nothing travels.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "server/collective/gradient_mode.h"
#include "server/device/device_op.h"

namespace shardd {

// One rank's contribution to a reduction.
struct GradientSource {
  int rank = 0;
  // Start of the group's gradient slot. The collective may overwrite the gradients there.
  char* slot = nullptr;
  std::vector<bool> present;  // by index_in_group; an absent gradient is never read
};

struct ReduceScatterRequest {
  const ShardPlan* plan = nullptr;  // outlives the request
  int group = 0;
  std::vector<GradientSource> sources;  // ascending ranks; added in this order
  std::vector<GradientMode> modes;      // by index_in_group; parameters present in no source are not touched
  char* gradients = nullptr;            // start of slab "gradients"; the result goes to each of plan->gradient_copies
  // Staging, if gradient shards are host memory that devices reach only by copies: by rank, memory of the rank's device
  // of staging_bytes (a positive multiple of 4096), in which sums are made a piece at a time. Ranks of one device may
  // share it, because the stream keeps the order. Empty: sums are made in place.
  std::vector<char*> staging;
  int64_t staging_bytes = 0;
  int gradients_file = -1;                     // file of the slab, if trainers give its pages back (ReduceOp.dst_file)
  DType reduce_dtype = v1::DTYPE_UNSPECIFIED;  // unspecified: that of the sources
  float scale = 1;                             // 1 / divide factor
  bool keep_low_precision = false;             // gradients are in reduce_dtype instead of their parameter's dtype
  std::string label;
  // By rank, or empty: zeroing of gradient shards before the rank's sums. Only for a collective that may_hold_requests;
  // others get it as separate work of the ranks' devices.
  std::vector<std::vector<DeviceOp>> zeros;
  // Several nodes (collective/nodes): identifies the reduction on all nodes, and the contributions. `sources` may be
  // empty if only other nodes contribute; `modes` cover the contributions of all nodes.
  struct NodeSum {
    uint64_t generation = 0;    // attempt of all nodes at a step (peer.proto); a later one ends earlier ones
    uint64_t sequence = 0;      // from 0 in each generation, without gaps, the same on all nodes
    std::vector<bool> present;  // by index_in_group: some node contributes it
  };
  std::optional<NodeSum> nodes;
};

struct AllGatherRequest {
  const ShardPlan* plan = nullptr;
  int group = 0;
  const char* shards = nullptr;  // start of slab "shards"
  char* destination = nullptr;   // start of an unsharded-pool slot; receives the group's image in unsharded_dtype
  // The rank whose device does all the work: if the slot is in that device's memory, other devices would have to write
  // there, and it reads their memory just as fast. -1: spread over all devices.
  int reader = -1;
  // Ascending byte offsets in slab "shards" where another device's memory begins; no copy crosses one.
  std::vector<int64_t> boundaries;
  std::string label;
  // Start of slab "parameters", the source of flat parameters that have a place there; null: the plan has no such slab.
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
  // For status: who reduces, and why not another.
  virtual std::string Describe() const = 0;
  // Reduces on `post_backward` of every rank's device: rank r's device writes rank r's work segments. The caller has
  // all sources, so nothing has to be paired here.
  virtual void ReduceScatter(ReduceScatterRequest request, Done done) = 0;
  // Runs on `unshard`, spread over all devices or on the reader's.
  virtual void AllGather(AllGatherRequest request, Done done) = 0;
  // Sets the rank's gradient slots, on its device; null: it has none. Requests name memory of the slabs set here, or no
  // slabs were ever set. An implementation that needs them keeps a reference.
  virtual void SetSlots(int /*rank*/, std::shared_ptr<const DeviceSlab> /*slots*/) {}
  // Not null: the ranks' sessions reduce; it must be told of them.
  virtual TrainerCollective* trainers() { return nullptr; }
  // True if a reduction may reach its devices after ReduceScatter returns, or never does. Work that is then submitted
  // to the devices is not ordered after it: wait for `done`, or send the work along (`zeros`).
  virtual bool may_hold_requests() const { return false; }
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_COLLECTIVE_H_
