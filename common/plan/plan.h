#ifndef SHARDD_COMMON_PLAN_PLAN_H_
#define SHARDD_COMMON_PLAN_PLAN_H_

// The shard plan, made from a module tree, a policy, a configuration and a world size. Pure: the same input gives the
// same plan on every rank and in the daemon, without I/O.
//
// Offsets: `_bytes` are bytes from the start of a slab or slot; others count elements of the flat parameter. On one
// node all ranks' shards of a flat parameter are adjacent, so the full flat parameter is one contiguous range in every
// slab, in both layouts. The layouts differ only in which rank owns which element (RankSegments) and in padding.
// Everything above the plan works on segments and does not know the layout.

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

// Limits that PlanShards enforces on its input (INVALID_ARGUMENT beyond them).
inline constexpr int kMaxWorldSize = 1024;
inline constexpr int kMaxModules = 1 << 20;
inline constexpr int kMaxParameters = 1 << 20;
inline constexpr int64_t kMaxJobNumel = int64_t{1} << 42;
inline constexpr int kSlabAlignmentBytes = 64;  // alignment of every flat parameter within a slab or slot
inline constexpr int64_t kPoolAlignmentBytes = int64_t{2} << 20;  // alignment of each pool if there are several: the
                                                                  // page size of GPU memory
inline constexpr int kParamAlignmentBytes = 16;  // alignment of every parameter within a flat parameter, in the
                                                 // smallest dtype in which it is ever stored

// A managed parameter; tied parameters are one ParamPlan.
struct ParamPlan {
  std::string fqn;                   // clean; of the first use in traversal order
  std::vector<std::string> aliases;  // clean; the other uses
  std::vector<int64_t> shape;        // empty: scalar
  int64_t numel = 0;
  DType dtype = v1::DTYPE_UNSPECIFIED;  // as stored
  bool requires_grad = false;
  int group = 0;
  int index_in_group = 0;  // its bit in presence masks
  int flat_param = 0;
  int64_t offset = 0;       // elements from the start of the flat parameter
  int optimizer_group = 0;  // -1: frozen
  int whole_at = -1;        // the place that has all of it (PlaceWholeParams); -1: it is cut as the placement says
};

// Parameters of one group with the same (dtype, requires_grad), flattened and concatenated.
struct FlatParamPlan {
  int group = 0;
  DType dtype = v1::DTYPE_UNSPECIFIED;            // as stored in the shards
  DType unsharded_dtype = v1::DTYPE_UNSPECIFIED;  // as unsharded: param_dtype for floating dtypes
  bool requires_grad = false;
  std::vector<int> params;   // indices into ShardPlan::params, in offset order
  int64_t numel = 0;         // with inner padding, without padding at the end
  int64_t padded_numel = 0;  // FLAT: a multiple of every number of pieces; DIM0: numel
  int64_t shard_numel = 0;   // of one rank's parameters. FLAT: of every rank; DIM0: of the largest; where
                             // parameters are whole: at most
  // Byte offsets within slabs; -1: none.
  int64_t shards_offset_bytes = -1;     // slab "shards", elements of `dtype`
  int64_t params_offset_bytes = -1;     // slab "parameters", elements of `unsharded_dtype`; -1: unsharded from shards
                                        // (POOLED: -1 unless OFFLOAD_HOST; with pass_copies never -1)
  int64_t gradients_offset_bytes = -1;  // slab "gradients", fp32; -1: frozen
  int64_t optimizer_offset_bytes =
      -1;                            // slab "optimizer": state k at this + k * StateStrideBytes(), fp32. A state with
                                     // less than an element for each of a parameter's (StateNumel) is at its start
  int optimizer_states = 0;          // of which there are so many: the most that one of its parameters has
  int64_t slot_offset_bytes = -1;    // within the group's gradient slot, elements of `unsharded_dtype`
  int64_t pool_offset_bytes = -1;    // within an unsharded-pool slot, elements of `unsharded_dtype`
  int64_t StateStrideBytes() const;  // padded_numel * 4, rounded up to kSlabAlignmentBytes
};

// What one unshard/reshard pair moves.
struct GroupPlan {
  std::string name;  // clean FQN of the fully sharded module; "(root)" for the root
  int module = 0;    // index into the tree
  int depth = 0;     // number of fully sharded modules above it
  bool reshard_after_forward = true;
  // Number of ranks over which its parameters are cut between forward and backward. 1 also if there is nothing to cut:
  // reshard_after_forward alone says whether it is resharded.
  int post_forward_shard_size = 1;
  std::vector<int> params;             // indices into ShardPlan::params, by index_in_group
  std::vector<int> flat_params;        // indices into ShardPlan::flat_params
  std::vector<int> also_unshards;      // groups with tied parameters that modules of this group use; ascending
  int gradient_slot = -1;              // index into ShardPlan::gradient_slots; -1: nothing is trained
  int64_t numel = 0;                   // of its parameters, without padding
  int64_t unsharded_bytes = 0;         // size of its image in an unsharded-pool slot
  int64_t gradient_bytes = 0;          // size of its image in a gradient slot
  v1::MixedPrecision mixed_precision;  // of its module, else of the job
};

// A gradient slot, in each rank's session memory. The plan assigns slots to groups: at each nesting depth the groups
// take turns over two slots, or over as many as fit into 1 MiB (one each if there are fewer groups). A group nested in
// another never shares its slot.
struct SlotPlan {
  int64_t offset_bytes = 0;  // from the start of the slot area; multiples of 4096
  int64_t size_bytes = 0;
};

// Slots of the unsharded pool (POOLED) that some ranks share: pool p serves the ranks r with r mod pools = p.
struct PoolPlan {
  int slots = 0;
  int64_t offset_bytes = 0;  // of its first slot, from the start of slab "unsharded pool"
};

// Parameters cut over nodes, on GPUs: memory of each rank's GPU for parts of groups (node_part.h), in this order: what
// it sends, slots for what it gets, and what it greets other nodes with. All zero if nothing is cut over nodes.
struct GatherStaging {
  int64_t own_bytes = 0;   // the most of a group that a rank of this node sends
  int64_t slot_bytes = 0;  // the most of a group that it gets, each node's part at a multiple of kRailAlignmentBytes
  int64_t greeting_bytes = 0;
  int64_t stride_bytes = 0;  // from one rank to the next: all of these, in multiples of kPoolAlignmentBytes
};

// Bytes by purpose on this node with all ranks attached, copies for replicas included.
struct MemoryPlan {
  int64_t shards_bytes = 0;
  int64_t parameters_bytes =
      0;  // the cast copy; 0 when unsharded from shards or pooled. pass_copies: of all parameters
  int64_t gradients_bytes = 0;
  int64_t optimizer_bytes = 0;
  int64_t unsharded_pool_bytes = 0;
  int64_t gradient_staging_bytes = 0;  // OFFLOAD_HOST: of all pools; several nodes: of all ranks
  int64_t node_receive_bytes = 0;      // several nodes: host memory for what the other nodes send
  int64_t gradient_slots_bytes = 0;    // of one rank
  int64_t session_bytes = 0;           // of one rank: session memory (gradient slots included) and daemon page
  int64_t kept_bytes = 0;              // trainers write: the snapshot; over nodes two of them, one behind the other
  int64_t snapshot_bytes = 0;          // of one of them
  int64_t journal_bytes = 0;           // two decided steps, trainer states included
  int64_t undo_bytes = 0;              // several optimizers: old bytes of what parts of a step change, which stay
  int64_t workspace_bytes = 0;         // Muon, Adafactor: what ranks' threads update whole parameters in
  // Bytes of these slabs that have memory: all of them, unless parameters are cut over nodes. In that case the slabs
  // have their full size, but only what this node's ranks hold has memory, in whole pages (node_part.h).
  int64_t held_shards_bytes = 0;
  int64_t held_gradients_bytes = 0;
  int64_t held_optimizer_bytes = 0;
  int64_t held_parameters_bytes = 0;
  int64_t held_kept_bytes = 0;
  GatherStaging gather_staging;
  // Where the devices are CPUs; and GPUs, which receive from other nodes into staging of their own, and serve no parts
  // of steps.
  int64_t TotalBytes(int world_size) const;
  int64_t TotalBytesOnGpus(int world_size) const;
};

// Bytes by purpose of the largest rank under this placement, if ranks had separate memory. Without padding between
// parameters.
struct PlacedMemory {
  int64_t parameters_bytes = 0;    // its shards, in the stored dtypes
  int64_t gradients_bytes = 0;     // reduced, fp32
  int64_t optimizer_bytes = 0;     // all states, fp32
  int64_t post_forward_bytes = 0;  // unsharded parameters between forward and backward
};

// Elements [first, first + numel) of one parameter; numel may be 0.
struct ParamRange {
  int64_t first = 0;
  int64_t numel = 0;
};

// The part of a parameter that one rank owns: elements [offset, offset + numel) of the flat parameter.
struct Segment {
  int param = 0;       // index into ShardPlan::params
  int64_t offset = 0;  // elements from the start of the flat parameter
  int64_t numel = 0;   // > 0
};

// What a rank's shard of one flat parameter contains.
struct ShardMetadata {
  struct Piece {
    int param = 0;
    int64_t first = 0;  // element of the parameter
    int64_t numel = 0;
  };
  std::vector<Piece> pieces;  // in offset order, none empty
  int64_t padding_numel = 0;  // elements of the shard that belong to no parameter; where some are whole: 0
};

// Number of groups that nodes reduce between them at a time.
inline constexpr int kNodeSlots = 2;
inline constexpr int kMaxNodes = 64;
inline constexpr int kMaxPlaces = 4096;  // ranks of all nodes over which one copy is cut
// Parameters cut over nodes: bytes in flight to one other node.
inline constexpr int64_t kGatherBytes = int64_t{4} << 20;

struct ShardPlan {
  int world_size = 0;  // of this node
  // One copy of everything is cut over the ranks of several nodes: of all with FULL_SHARD and SHARD_GRAD_OP, of those
  // of a row where shard groups of a hybrid strategy span nodes (node_part.h). Then the plan is that of one `node` of a
  // row, by its place there; its rank r is place node * world_size + r of the placement, and functions below take ranks
  // of this node. Otherwise `node` is 0 and all nodes have the same plan. The digest is the same on all nodes.
  bool cut_over_nodes = false;
  int node = 0;
  v1::JobConfig config;  // with defaults filled in
  // The optimizer is the trainers', and the job does not say how often snapshots are taken: what they cost decides, and
  // config.keep_every is the most. Not in the digest: it is the daemon's alone.
  bool snapshots_by_cost = false;
  Placement placement;
  // Number of copies of shards, optimizer state and gradient shards in their slabs: 1, or one per replica
  // (JobConfig.replica_copies). Copy c begins c strides after copy 0, which the daemon reads and updates.
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
  // POOLED: number of groups that a rank may have unsharded, prefetched ones included: the most that it needs at once
  // (a group, those around it, those with its tied parameters, and all that are not resharded after forward) plus
  // max_inflight_unshards, but never more than there are groups.
  int pool_quota = 0;
  // JobConfig.unsharded_pools of them; empty unless POOLED. A pool has pool_quota slots for each of its ranks, but
  // never more than there are groups: only one version is read at a time, and the ranks of a pool share slots.
  std::vector<PoolPlan> pools;
  int pool_slots = 0;  // of all pools
  int64_t pool_slot_bytes = 0;
  // Staging for sums. OFFLOAD_HOST: before they are copied to the host, a piece at a time; one for the ranks of each
  // pool, because each GPU adds in the order of one stream. Several nodes: sums over this node's ranks, before those of
  // the other nodes are added; one for each rank. This is the distance between two; 0: none.
  int64_t staging_stride_bytes = 0;
  int64_t staging_bytes = 0;  // of one. OFFLOAD_HOST: at most 32 MiB, and at most what the largest flat parameter
                              // takes in fp32. Several nodes: kNodeSlots of node_slot_bytes
  int64_t workspace_stride_bytes = 0;  // Muon, Adafactor: of one rank's part of the workspace; 0: none
  int64_t node_slot_bytes = 0;   // several nodes: the largest part of a group that one rank reduces, in fp32, each
                                 // segment padded to kSlabAlignmentBytes; whole pages
  int64_t node_piece_bytes = 0;  // several nodes: the most of a group that one node adds for all nodes
  int optimizer_states = 0;      // the most fp32 tensors per parameter: AdamW 2, SGD 0 or 1
  MemoryPlan memory;
  std::string digest;                                   // SHA-256 (32 bytes) over everything that must agree
  absl::flat_hash_map<std::string, int> param_by_fqn;   // clean names and aliases
  absl::flat_hash_map<std::string, int> group_by_name;  // clean names; "(root)"
  // Over nodes, beside an optimizer of the daemon's: trainers store into private views of their shards, and ranks of
  // all nodes make a version of it together, as of full parameters that they write back. Nothing reaches the shards
  // otherwise.
  bool writes_edits_back() const {
    return nodes() > 1 && !config.trainers_never_write() && !config.pass_copies() &&
           config.optimizer().kind() != v1::OPTIMIZER_KIND_TRAINER;
  }
  int nodes() const { return config.nodes().addresses().empty() ? 1 : config.nodes().addresses_size(); }
  // The place of a rank of this node in the placement.
  int PlaceOf(int rank) const { return cut_over_nodes ? node * world_size + rank : rank; }
  // Number of stagings, staging_stride_bytes apart; rank r uses number r mod this.
  int staging_count() const { return nodes() > 1 ? world_size : static_cast<int>(pools.size()); }
  // The parameter's index, -1 if unknown. Cleans the name first. The root group is "(root)" or "".
  int FindParam(absl::string_view fqn) const;
  int FindGroup(absl::string_view name) const;
  // The parameter of element `offset` of the flat parameter; -1: padding, or out of range.
  int ParamAt(int flat_param, int64_t offset) const;
};

// Makes the plan. INVALID_ARGUMENT (the text names module or parameter, got and want): the spec is malformed, or the
// node is out of range. UNIMPLEMENTED: not served yet. A tree without anything to manage is an error.
absl::StatusOr<ShardPlan> PlanShards(const v1::JobSpec& spec, int node = 0);

// The parts of flat parameter `flat_param` that `rank` holds of `purpose`, in offset order; none for an empty shard.
// Every rank holds what is replicated.
std::vector<Segment> OwnedSegments(const ShardPlan& plan, Purpose purpose, int flat_param, int rank);

// OwnedSegments of the parameters: the rank's shard.
std::vector<Segment> RankSegments(const ShardPlan& plan, int flat_param, int rank);

// The part of the shards that the rank's trainer may write (and of the optimizer state, if trainers run the optimizer):
// with an optimizer in the trainers, what the rank holds of its state; else the rank's shard. If several ranks hold the
// same bytes and these are stored once, only the first holder writes them, because a second update of the same bytes
// would be wrong. That is replica 0 of the shard group: its ranks together write every row once, and the other replicas
// write nothing.
std::vector<Segment> WriteSegments(const ShardPlan& plan, int flat_param, int rank);

// The part of the daemon's work (sums, norms, updates) that is done for the rank. A partition among the ranks in every
// placement (of all nodes, if parameters are cut over them): within the rank's shard, even over its replicas.
std::vector<Segment> WorkSegments(const ShardPlan& plan, int flat_param, int rank);

// The part of one parameter's reduced gradient that the rank's trainer may change: what it holds, unless an earlier
// rank holds the same bytes. REQUIRES: the plan has param and rank.
ParamRange GradientWriteRange(const ShardPlan& plan, int param, int rank);

// OwnedSegments of one parameter, which is one range. REQUIRES: the plan has param and rank.
ParamRange OwnedRange(const ShardPlan& plan, Purpose purpose, int param, int rank);

// WriteSegments of one parameter, which is one range.
ParamRange WriteRange(const ShardPlan& plan, int param, int rank);

// Memory of the largest rank, if ranks did not share memory.
PlacedMemory PredictPlacedMemory(const ShardPlan& plan);

// INVALID_ARGUMENT: rank or flat parameter out of range.
absl::StatusOr<ShardMetadata> GetShardMetadata(const ShardPlan& plan, int flat_param, int rank);

// The first difference in words: `parameter "a.b.weight": shape differs (got [3, 4], want [4, 4])`; empty if both
// describe the same job. For specs whose digests differ.
std::string FirstDifference(const v1::JobSpec& got, const v1::JobSpec& want);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_PLAN_H_
