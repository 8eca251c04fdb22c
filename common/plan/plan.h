#ifndef SHARDD_COMMON_PLAN_PLAN_H_
#define SHARDD_COMMON_PLAN_PLAN_H_

// The shard plan: what a module tree, a policy, a configuration and a world size come to. Pure: same input, same plan,
// on every rank and in the daemon; nothing here does I/O.
//
// Offsets: `_bytes` are bytes from the start of a slab or slot; others count elements of the flat parameter.
// On one node all ranks' shards of a flat parameter lie side by side, so the full flat parameter is one contiguous
// range in every slab, in both layouts; the layouts differ only in which rank owns which element (RankSegments) and in
// padding. Everything above the plan speaks of segments and does not know the layout.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/plan/placement.h"
#include "common/tensor/dtype.h"
#include "shardd/v1/model.pb.h"

namespace shardd {

// Bounds that PlanShards enforces on its input (INVALID_ARGUMENT beyond them).
inline constexpr int kMaxWorldSize = 1024;
inline constexpr int kMaxModules = 1 << 20;
inline constexpr int kMaxParameters = 1 << 20;
inline constexpr int64_t kMaxJobNumel = int64_t{1} << 42;
inline constexpr int kSlabAlignmentBytes = 64;  // of every flat parameter's start within a slab or slot
inline constexpr int64_t kPoolAlignmentBytes = int64_t{2} << 20;  // of a pool's start, where there are several: a GPU's
                                                                  // memory comes in such pages
inline constexpr int kParamAlignmentBytes = 16;  // of every parameter's start within a flat parameter, in the smallest
                                                 // dtype it is ever stored in

// A managed parameter; tied parameters are one ParamPlan.
struct ParamPlan {
  std::string fqn;                   // clean; of the first use in traversal order
  std::vector<std::string> aliases;  // clean; the other uses
  std::vector<int64_t> shape;        // empty: scalar
  int64_t numel = 0;
  DType dtype = v1::DTYPE_UNSPECIFIED;  // of the stored parameter
  bool requires_grad = false;
  int group = 0;
  int index_in_group = 0;  // its bit in presence masks
  int flat_param = 0;
  int64_t offset = 0;       // elements from the start of the flat parameter
  int optimizer_group = 0;  // -1: frozen
};

// Parameters of one group with the same (dtype, requires_grad), flattened and concatenated.
struct FlatParamPlan {
  int group = 0;
  DType dtype = v1::DTYPE_UNSPECIFIED;            // of the shards
  DType unsharded_dtype = v1::DTYPE_UNSPECIFIED;  // what unshard gives: param_dtype for floating dtypes
  bool requires_grad = false;
  std::vector<int> params;   // indices into ShardPlan::params, in offset order
  int64_t numel = 0;         // with inner padding, without the tail's
  int64_t padded_numel = 0;  // FLAT: a multiple of every number of pieces; DIM0: numel
  int64_t shard_numel = 0;   // of a rank's parameters. FLAT: of each rank; DIM0: of the largest
  // Byte offsets within slabs; -1 where there is none.
  int64_t shards_offset_bytes = -1;     // slab "shards", elements of `dtype`
  int64_t params_offset_bytes = -1;     // slab "parameters", elements of `unsharded_dtype`; -1: unsharded from shards
                                        // (POOLED: with OFFLOAD_HOST alone). With pass_copies never
  int64_t gradients_offset_bytes = -1;  // slab "gradients", fp32; -1: frozen
  int64_t optimizer_offset_bytes = -1;  // slab "optimizer": state k at this + k * StateStrideBytes(), fp32
  int64_t slot_offset_bytes = -1;       // within the group's gradient slot, elements of `unsharded_dtype`
  int64_t pool_offset_bytes = -1;       // within an unsharded-pool slot, elements of `unsharded_dtype`
  int64_t StateStrideBytes() const;     // padded_numel * 4, rounded up to kSlabAlignmentBytes
};

// What one unshard/reshard pair moves.
struct GroupPlan {
  std::string name;  // clean FQN of the fully sharded module; "(root)" for the root
  int module = 0;    // index into the tree
  int depth = 0;     // number of fully sharded modules above it
  bool reshard_after_forward = true;
  // Over how many ranks its parameters are cut from the end of forward to backward. Whether it is resharded says
  // reshard_after_forward: 1 also where there is nothing to cut.
  int post_forward_shard_size = 1;
  std::vector<int> params;             // indices into ShardPlan::params, by index_in_group
  std::vector<int> flat_params;        // indices into ShardPlan::flat_params
  std::vector<int> also_unshards;      // groups that hold tied parameters which modules of this group use; ascending
  int gradient_slot = -1;              // index into ShardPlan::gradient_slots; -1: nothing to train
  int64_t numel = 0;                   // of its parameters, without padding
  int64_t unsharded_bytes = 0;         // size of its image in an unsharded-pool slot
  int64_t gradient_bytes = 0;          // size of its image in a gradient slot
  v1::MixedPrecision mixed_precision;  // its module's, else the job's
};

// A gradient slot, in each rank's session memory. Groups are given slots statically: at each nesting depth the groups
// take turns over two, or over as many as fit into 1 MiB (one each, if there are fewer groups), so a group nested in
// another never shares its slot.
struct SlotPlan {
  int64_t offset_bytes = 0;  // from the start of the slot area; multiples of 4096
  int64_t size_bytes = 0;
};

// Slots of the unsharded pool (POOLED) that some ranks share: rank r those of pool r mod pools.
struct PoolPlan {
  int slots = 0;
  int64_t offset_bytes = 0;  // of its first slot, from the start of slab "unsharded pool"
};

// Bytes by purpose, on this node, with all ranks of the job on it. Copies of replicas included.
struct MemoryPlan {
  int64_t shards_bytes = 0;
  int64_t parameters_bytes =
      0;  // the cast copy; 0 when unsharded from shards or pooled. pass_copies: of all parameters
  int64_t gradients_bytes = 0;
  int64_t optimizer_bytes = 0;
  int64_t unsharded_pool_bytes = 0;
  int64_t gradient_staging_bytes = 0;  // OFFLOAD_HOST: of all pools; several nodes: of all ranks
  int64_t node_receive_bytes = 0;      // several nodes: of host memory, what the others send to be added and are sent
  int64_t gradient_slots_bytes = 0;    // of one rank
  int64_t session_bytes = 0;           // of one rank: session memory (gradient slots included) and daemon page
  int64_t kept_bytes = 0;              // jobs whose trainers write: the copy to go back to
  int64_t journal_bytes = 0;           // two decided steps, trainers' states included
  // What is there of shards, gradients and optimizer: all, but where parameters are cut over nodes. There the slabs
  // are as large as ever, and of memory have what the ranks of this node hold, in whole pages (node_part.h).
  int64_t held_shards_bytes = 0;
  int64_t held_gradients_bytes = 0;
  int64_t held_optimizer_bytes = 0;
  int64_t TotalBytes(int world_size) const;
};

// Bytes by purpose of one rank, the largest, where ranks have memory of their own: what the placement comes to. Without
// padding between parameters.
struct PlacedMemory {
  int64_t parameters_bytes = 0;    // its shards, in the stored dtypes
  int64_t gradients_bytes = 0;     // reduced, fp32
  int64_t optimizer_bytes = 0;     // all states, fp32
  int64_t post_forward_bytes = 0;  // of unsharded parameters, kept from the end of forward to backward
};

// Elements [first, first + numel) of one parameter; numel may be 0.
struct ParamRange {
  int64_t first = 0;
  int64_t numel = 0;
};

// A piece of a parameter that one rank owns: elements [offset, offset + numel) of the flat parameter.
struct Segment {
  int param = 0;       // index into ShardPlan::params
  int64_t offset = 0;  // elements from the start of the flat parameter
  int64_t numel = 0;   // > 0
};

// S2: what a rank's shard of one flat parameter holds.
struct ShardMetadata {
  struct Piece {
    int param = 0;
    int64_t first = 0;  // element of the parameter
    int64_t numel = 0;
  };
  std::vector<Piece> pieces;  // in offset order, none empty
  int64_t padding_numel = 0;  // elements of the shard that belong to no parameter
};

// Of groups that are added between nodes at a time.
inline constexpr int kNodeSlots = 2;
inline constexpr int kMaxNodes = 64;
inline constexpr int kMaxPlaces = 4096;  // ranks of all nodes that one copy is cut over
// Where parameters are cut over nodes: of pieces on their way to one other node.
inline constexpr int64_t kGatherBytes = int64_t{4} << 20;

struct ShardPlan {
  int world_size = 0;  // of this node
  // Several nodes and FULL_SHARD or SHARD_GRAD_OP: one copy of everything is cut over the ranks of all nodes. Then the
  // plan is that of one `node`, whose rank r is place node * world_size + r of the placement: what functions below say
  // of a rank is of a rank of this node. Else 0, and all nodes have the same plan. The digest is the same on all.
  bool cut_over_nodes = false;
  int node = 0;
  v1::JobConfig config;  // with defaults filled in
  Placement placement;
  // How often shards, optimizer state and gradient shards lie in their slabs: once, or once per replica
  // (JobConfig.replica_copies). Copy c begins c strides behind copy 0, which is what the daemon reads and updates.
  int shard_copies = 1;
  int optimizer_copies = 1;
  int gradient_copies = 1;
  int64_t shards_stride_bytes = 0;
  int64_t optimizer_stride_bytes = 0;
  int64_t gradients_stride_bytes = 0;
  std::vector<ParamPlan> params;
  std::vector<FlatParamPlan> flat_params;
  std::vector<GroupPlan> groups;  // left-to-right, depth-first pre-order of their modules
  std::vector<SlotPlan> gradient_slots;
  // POOLED: how many groups a rank may hold, prefetched ones included: the most that it holds at once (a group, those
  // around it, those that hold its tied parameters, and all that are not resharded after forward) and
  // max_inflight_unshards; never more than there are groups.
  int pool_quota = 0;
  // JobConfig.unsharded_pools of them; empty unless POOLED. A pool's slots are pool_quota for each of its ranks, never
  // more than there are groups: one version is read at a time, and ranks of a pool share slots.
  std::vector<PoolPlan> pools;
  int pool_slots = 0;  // of all pools
  int64_t pool_slot_bytes = 0;
  // OFFLOAD_HOST: sums are made here before they are copied to the host, a piece at a time. One for the ranks of each
  // pool, so many bytes apart: each GPU adds in the order of one stream, so one serves all its groups. Else 0.
  // Several nodes: sums over this node's ranks, which are then added to those of the others; one for each rank.
  int64_t staging_stride_bytes = 0;
  int64_t staging_bytes = 0;     // of one: no more than the largest flat parameter takes in fp32, nor 32 MiB
                                 // Several nodes: kNodeSlots of node_slot_bytes
  int64_t node_slot_bytes = 0;   // several nodes: the largest part of a group that one rank adds, in fp32, each of its
                                 // segments padded to kSlabAlignmentBytes; whole pages
  int64_t node_piece_bytes = 0;  // several nodes: the most that one node adds of what all ranks have of a group
  int optimizer_states = 0;      // fp32 tensors per parameter: AdamW 2, SGD 0 or 1
  MemoryPlan memory;
  std::string digest;                                   // 32 bytes, SHA-256 over everything that must agree
  absl::flat_hash_map<std::string, int> param_by_fqn;   // clean names and aliases
  absl::flat_hash_map<std::string, int> group_by_name;  // clean names; "(root)"
  int nodes() const { return config.nodes().addresses().empty() ? 1 : config.nodes().addresses_size(); }
  // Of a rank of this node in the placement, and how many there are.
  int PlaceOf(int rank) const { return cut_over_nodes ? node * world_size + rank : rank; }
  int places() const { return cut_over_nodes ? nodes() * world_size : world_size; }
  // How many stagings of staging_stride_bytes there are; rank r uses number r mod this.
  int staging_count() const { return nodes() > 1 ? world_size : static_cast<int>(pools.size()); }
  // -1 when unknown; cleans the name first. The root group is "(root)" or "".
  int FindParam(absl::string_view fqn) const;
  int FindGroup(absl::string_view name) const;
  // The parameter that element `offset` of the flat parameter belongs to; -1 for padding and out of range.
  int ParamAt(int flat_param, int64_t offset) const;
};

// INVALID_ARGUMENT (the text names module or parameter, got and want) for a malformed spec, and for a node out of
// range; UNIMPLEMENTED for what is not served yet. A tree with nothing to manage is an error (S1: empty list).
absl::StatusOr<ShardPlan> PlanShards(const v1::JobSpec& spec, int node = 0);

// The pieces of flat parameter `flat_param` that `rank` holds of what is placed for `purpose`, in offset order; empty
// shards give none. What is replicated, every rank holds.
std::vector<Segment> OwnedSegments(const ShardPlan& plan, Purpose purpose, int flat_param, int rank);

// Of the parameters: the rank's shard.
std::vector<Segment> RankSegments(const ShardPlan& plan, int flat_param, int rank);

// What the rank, as a trainer, may write of shards, and with an optimizer in the trainers of its state: what it holds
// the optimizer state of; with the daemon's, its shard. Where several ranks hold the same and it is stored once, the
// first of them writes for all, because a second update of the same bytes would be one too many: that is replica 0 of
// the shard group, so that the ranks of replica 0 together write every row once. The others have nothing to write.
std::vector<Segment> WriteSegments(const ShardPlan& plan, int flat_param, int rank);

// A partition among the ranks (of all nodes, where parameters are cut over them) in every placement: who does the
// daemon's work (sums, norms, updates) for which element. Within the rank's shard, evenly over its replicas.
std::vector<Segment> WorkSegments(const ShardPlan& plan, int flat_param, int rank);

// What the rank, as a trainer, may change of the reduced gradient of one parameter: what it holds, where no rank before
// it holds the same bytes. REQUIRES: param and rank within the plan.
ParamRange GradientWriteRange(const ShardPlan& plan, int param, int rank);

// OwnedSegments of one parameter, which is one range. REQUIRES: param and rank within the plan.
ParamRange OwnedRange(const ShardPlan& plan, Purpose purpose, int param, int rank);

// WriteSegments likewise.
ParamRange WriteRange(const ShardPlan& plan, int param, int rank);

// What the largest rank would hold without shared memory.
PlacedMemory PredictPlacedMemory(const ShardPlan& plan);

// INVALID_ARGUMENT for a rank or flat parameter out of range.
absl::StatusOr<ShardMetadata> GetShardMetadata(const ShardPlan& plan, int flat_param, int rank);

// Empty when both describe the same job; else the first difference in words: `parameter "a.b.weight": shape differs
// (got [3, 4], want [4, 4])`. Used where digests disagree.
std::string FirstDifference(const v1::JobSpec& got, const v1::JobSpec& want);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_PLAN_H_
