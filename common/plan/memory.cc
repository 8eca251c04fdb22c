// Offsets in the slabs and their bytes: the prediction by which a job is admitted, and when parameters are cast
// (LayOutSlabs).

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/plan/layout_internal.h"
#include "common/plan/node_part.h"
#include "common/plan/optimizer_kinds.h"
#include "common/plan/pass_copies.h"
#include "common/plan/session_layout.h"
#include "common/plan/whole_params.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace plan_internal {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kFp32Bytes = 4;
constexpr int64_t kSmallSlotsBytes = int64_t{1} << 20;  // gradient slots of small groups at one nesting depth
constexpr int64_t kMaxPoolBytes = int64_t{1} << 56;
// Copying this much takes a millisecond, so that the kernels and calls around it do not count.
constexpr int64_t kMaxStagingBytes = int64_t{32} << 20;

// Reserves room in a slab, slot or image.
int64_t Take(int64_t& end_bytes, int64_t size_bytes) {
  const int64_t offset_bytes = end_bytes;
  end_bytes = RoundUp(offset_bytes + size_bytes, kSlabAlignmentBytes);
  return offset_bytes;
}

void LayOutSlabs(ShardPlan& plan) {
  const bool is_pooled = plan.config.unshard_mode() == v1::UNSHARD_MODE_POOLED;
  // What leaves host memory is cast there once per version: fewer bytes to copy, and no GPU reads the others.
  const bool is_cast_at_commit = !is_pooled || plan.config.offload() == v1::OFFLOAD_HOST;
  for (FlatParamPlan& flat : plan.flat_params) {
    GroupPlan& group = plan.groups[flat.group];
    const int64_t unsharded_bytes = flat.padded_numel * DTypeSizeBytes(flat.unsharded_dtype);
    flat.shards_offset_bytes = Take(plan.memory.shards_bytes, flat.padded_numel * DTypeSizeBytes(flat.dtype));
    const int64_t image_offset_bytes = Take(group.unsharded_bytes, unsharded_bytes);
    if (is_pooled) {
      flat.pool_offset_bytes = image_offset_bytes;
    }
    if (plan.config.pass_copies() || (is_cast_at_commit && flat.unsharded_dtype != flat.dtype)) {
      flat.params_offset_bytes = Take(plan.memory.parameters_bytes, unsharded_bytes);
    }
    if (!flat.requires_grad) {
      continue;
    }
    flat.gradients_offset_bytes = Take(plan.memory.gradients_bytes, flat.padded_numel * kFp32Bytes);
    flat.slot_offset_bytes = Take(group.gradient_bytes, unsharded_bytes);
    for (const int param : flat.params) {
      flat.optimizer_states = std::max(flat.optimizer_states,
                                       OptimizerStatesOf(plan.config.optimizer(), plan.params[param].optimizer_group));
    }
    plan.optimizer_states = std::max(plan.optimizer_states, flat.optimizer_states);
    if (flat.optimizer_states > 0) {
      flat.optimizer_offset_bytes = Take(plan.memory.optimizer_bytes, flat.optimizer_states * flat.StateStrideBytes());
    }
  }
}

// What trainers of several replicas may write has one copy per replica in its slab: each trainer reads and changes its
// copy, and no other may change it meanwhile.
void CopyForReplicas(ShardPlan& plan) {
  // Cut over the world, every row has one holder anyway.
  const auto copies = [&plan](Purpose purpose) {
    const bool shared = plan.placement.pieces(purpose) < plan.world_size;
    return plan.config.replica_copies() && shared ? plan.placement.replicas : 1;
  };
  plan.gradient_copies = copies(Purpose::kGradients);
  if (!plan.config.trainers_never_write()) {
    plan.shard_copies = copies(WritersPurpose(plan));
  }
  if (plan.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER) {
    plan.optimizer_copies = plan.shard_copies;
  }
  plan.shards_stride_bytes = plan.memory.shards_bytes;
  plan.optimizer_stride_bytes = plan.memory.optimizer_bytes;
  plan.gradients_stride_bytes = plan.memory.gradients_bytes;
  plan.memory.shards_bytes *= plan.shard_copies;
  plan.memory.optimizer_bytes *= plan.optimizer_copies;
  plan.memory.gradients_bytes *= plan.gradient_copies;
}

void AssignGradientSlots(ShardPlan& plan) {
  int max_depth = 0;
  for (const GroupPlan& group : plan.groups) {
    max_depth = std::max(max_depth, group.depth);
  }
  std::vector<int> slots_at(max_depth + 1, 0);
  std::vector<int64_t> largest_at(max_depth + 1, 1);
  for (const GroupPlan& group : plan.groups) {
    slots_at[group.depth] += group.gradient_bytes > 0 ? 1 : 0;
    largest_at[group.depth] = std::max(largest_at[group.depth], group.gradient_bytes);
  }
  // Two slots at a depth let a trainer write one group's gradients while its neighbour's are reduced. Small groups get
  // more, because a round trip to the daemon takes longer than their backward.
  std::vector<int> first_slot(max_depth + 1, 0);
  int slots = 0;
  for (int depth = 0; depth <= max_depth; ++depth) {
    first_slot[depth] = slots;
    const int64_t most = std::max<int64_t>(2, kSmallSlotsBytes / RoundUp(largest_at[depth], kPageBytes));
    slots_at[depth] = static_cast<int>(std::min<int64_t>(slots_at[depth], most));
    slots += slots_at[depth];
  }
  plan.gradient_slots.resize(slots);
  std::vector<int> seen_at(max_depth + 1, 0);
  for (GroupPlan& group : plan.groups) {
    if (group.gradient_bytes == 0) {
      continue;
    }
    group.gradient_slot = first_slot[group.depth] + seen_at[group.depth]++ % slots_at[group.depth];
    SlotPlan& slot = plan.gradient_slots[group.gradient_slot];
    slot.size_bytes = std::max(slot.size_bytes, group.gradient_bytes);
  }
  for (SlotPlan& slot : plan.gradient_slots) {
    slot.offset_bytes = plan.memory.gradient_slots_bytes;
    plan.memory.gradient_slots_bytes = RoundUp(slot.offset_bytes + slot.size_bytes, kPageBytes);
  }
}

// The most groups that one rank can have unsharded at once, so that it never waits for a slot that only it could
// release.
int MostGroupsUnsharded(const ShardPlan& plan) {
  int always_unsharded = 0;
  for (const GroupPlan& group : plan.groups) {
    always_unsharded += group.reshard_after_forward ? 0 : 1;
  }
  int most = always_unsharded;
  // Pre-order: the chain of groups around the current one is a stack by depth. `users` counts, by group, how many in
  // the chain need it.
  std::vector<int> chain;
  std::vector<int> users(plan.groups.size(), 0);
  int unsharded = always_unsharded;
  const auto use = [&](int g, int change) {
    const bool was_used = users[g] > 0;
    users[g] += change;
    const bool is_used = users[g] > 0;
    if (plan.groups[g].reshard_after_forward) {
      unsharded += (is_used ? 1 : 0) - (was_used ? 1 : 0);
    }
  };
  const auto use_with_ties = [&](int g, int change) {
    use(g, change);
    for (int other : plan.groups[g].also_unshards) {
      use(other, change);
    }
  };
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    while (static_cast<int>(chain.size()) > plan.groups[g].depth) {
      use_with_ties(chain.back(), -1);
      chain.pop_back();
    }
    chain.push_back(static_cast<int>(g));
    use_with_ties(static_cast<int>(g), 1);
    most = std::max(most, unsharded);
  }
  return most;
}

absl::Status SizePool(ShardPlan& plan) {
  if (plan.config.unshard_mode() != v1::UNSHARD_MODE_POOLED) {
    return absl::OkStatus();
  }
  const int groups = static_cast<int>(plan.groups.size());
  plan.pool_quota = std::min(groups, MostGroupsUnsharded(plan) + plan.config.max_inflight_unshards());
  for (const GroupPlan& group : plan.groups) {
    plan.pool_slot_bytes = std::max(plan.pool_slot_bytes, RoundUp(group.unsharded_bytes, kPageBytes));
  }
  const int pools = plan.config.unsharded_pools();
  for (int pool = 0; pool < pools; ++pool) {
    const int ranks = (plan.world_size - pool + pools - 1) / pools;
    plan.pools.push_back({std::min(groups, ranks * plan.pool_quota), 0});
    plan.pool_slots += plan.pools.back().slots;
  }
  // kMaxJobNumel bounds everything else, but not slots times slot, with deep nesting of one huge group.
  if (plan.pool_slot_bytes > kMaxPoolBytes / plan.pool_slots) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan unsharded pool: too large (got ", plan.pool_slots, " slots of ", plan.pool_slot_bytes,
                     " bytes, want <= ", kMaxPoolBytes, " bytes); use UNSHARD_MODE_ZERO_COPY or fewer nested groups"));
  }
  for (PoolPlan& pool : plan.pools) {
    pool.offset_bytes = plan.memory.unsharded_pool_bytes;
    const int64_t end_bytes = pool.offset_bytes + pool.slots * plan.pool_slot_bytes;
    plan.memory.unsharded_pool_bytes = pools > 1 ? RoundUp(end_bytes, kPoolAlignmentBytes) : end_bytes;
  }
  return absl::OkStatus();
}

// OFFLOAD_HOST: staging for sums before they are copied to the host.
void SizeStaging(ShardPlan& plan) {
  if (plan.config.offload() != v1::OFFLOAD_HOST) {
    return;
  }
  for (const FlatParamPlan& flat : plan.flat_params) {
    plan.staging_bytes =
        std::max(plan.staging_bytes, flat.requires_grad ? RoundUp(flat.padded_numel * kFp32Bytes, kPageBytes) : 0);
  }
  plan.staging_bytes = std::min(plan.staging_bytes, kMaxStagingBytes);
  const auto pools = static_cast<int64_t>(plan.pools.size());
  plan.staging_stride_bytes = pools > 1 ? RoundUp(plan.staging_bytes, kPoolAlignmentBytes) : plan.staging_bytes;
  plan.memory.gradient_staging_bytes = pools * plan.staging_stride_bytes;
}

// Several nodes: staging for the sums over this node's ranks before the other nodes' sums are added.
void SizeNodeStaging(ShardPlan& plan) {
  if (plan.nodes() == 1) {
    return;
  }
  // For one rank: the most, over all groups, of one node's piece of what all ranks have.
  const int pieces = NodesOfRow(plan);
  for (const GroupPlan& group : plan.groups) {
    std::vector<int64_t> of_rank(static_cast<size_t>(plan.world_size));
    for (int node = 0; node < pieces; ++node) {
      int64_t piece_bytes = 0;
      for (int rank = 0; rank < plan.world_size; ++rank) {
        int64_t bytes = 0;
        for (int f : group.flat_params) {
          for (const Segment& segment :
               plan.flat_params[f].requires_grad ? WorkSegmentsOn(plan, f, rank, node) : std::vector<Segment>()) {
            bytes += RoundUp(segment.numel * kFp32Bytes, kSlabAlignmentBytes);
          }
        }
        of_rank[static_cast<size_t>(rank)] += bytes;
        piece_bytes += bytes;
      }
      plan.node_piece_bytes = std::max(plan.node_piece_bytes, piece_bytes);
    }
    for (const int64_t bytes : of_rank) {
      plan.node_slot_bytes = std::max(plan.node_slot_bytes, RoundUp(bytes, kPageBytes));
    }
  }
  plan.staging_bytes = kNodeSlots * plan.node_slot_bytes;
  plan.staging_stride_bytes = RoundUp(plan.staging_bytes, kPoolAlignmentBytes);
  plan.memory.gradient_staging_bytes = plan.world_size * plan.staging_stride_bytes;
  // Each node adds its part of what all nodes have, one node's contribution at a time.
  if (!plan.cut_over_nodes) {
    plan.node_piece_bytes = plan.world_size * plan.node_slot_bytes / plan.nodes() + 1;
  } else if (HasRows(plan)) {  // the nodes with one place add a part of its piece each
    plan.node_piece_bytes = RoundUp(plan.node_piece_bytes * pieces / plan.nodes() + kFp32Bytes, kSlabAlignmentBytes);
  }
  const int64_t part_bytes = RoundUp(plan.node_piece_bytes, kPageBytes);
  plan.memory.node_receive_bytes = kNodeSlots * (plan.nodes() - 1) * part_bytes;
  if (plan.cut_over_nodes) {  // and room to cast parts of parameters before they are sent
    plan.memory.node_receive_bytes += (pieces - 1) * kGatherBytes;
  }
}

// Room to update one whole parameter for each rank that may have one to update.
void SizeWorkspace(ShardPlan& plan) {
  int wholes = 0;
  for (size_t p = 0; p < plan.params.size(); ++p) {
    if (!IsUpdatedWhole(plan, static_cast<int>(p))) continue;
    ++wholes;
    plan.workspace_stride_bytes =
        std::max(plan.workspace_stride_bytes, RoundUp(WholeWorkspaceBytes(plan, static_cast<int>(p)), kPageBytes));
  }
  // The first ranks of all nodes have one before any has another (PlaceWholeParams).
  const int of_node = plan.cut_over_nodes ? (wholes + plan.nodes() - 1) / plan.nodes() : wholes;
  plan.memory.workspace_bytes = plan.workspace_stride_bytes * std::min(of_node, plan.world_size);
}

int64_t HeldBytes(const ShardPlan& plan, HeldSlab which, int64_t size_bytes) {
  if (!HasHoles(plan, which)) {
    return size_bytes;
  }
  int64_t bytes = 0;
  for (const ByteRange& range : HeldRanges(plan, which)) bytes += range.end - range.first;
  return bytes;
}

// The most that old bytes of a slab take.
int64_t OldBytes(const ShardPlan& plan, HeldSlab which, int64_t size_bytes) {
  return HasHoles(plan, which) ? HeldChunksBytes(plan, which) : size_bytes;
}

// Whether passes read a copy of all that trainers write, as stored, so that it can serve as snapshot.
bool KeepsWhatPassesRead(const ShardPlan& plan) {
  return PassesReadWhatIsStored(plan) && plan.memory.optimizer_bytes == 0;
}

}  // namespace

absl::Status LayOutMemory(ShardPlan& plan) {
  LayOutSlabs(plan);
  CopyForReplicas(plan);
  AssignGradientSlots(plan);
  SHARDD_RETURN_IF_ERROR(SizePool(plan));
  SizeStaging(plan);
  SizeNodeStaging(plan);
  SizeWorkspace(plan);
  plan.memory.gather_staging = SizeGatherStaging(plan);
  const SessionLayout session = MakeSessionLayout(plan);
  plan.memory.session_bytes = session.memory_bytes + session.daemon_page_bytes;
  // What ranks write back over nodes is undone by old bytes, as any writeback is.
  if (!plan.config.trainers_never_write() && !plan.writes_edits_back() && !KeepsWhatPassesRead(plan)) {
    const bool in_trainers = plan.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
    plan.memory.snapshot_bytes = plan.memory.shards_bytes + (in_trainers ? plan.memory.optimizer_bytes : 0);
    // Over nodes one is of what is committed, and the next of what this node has promised to the others.
    plan.memory.kept_bytes = plan.memory.snapshot_bytes * (plan.nodes() > 1 ? 2 : 1);
  }
  // A decided step: hyperparameters, masks and counts by parameter, every rank's trainer state.
  const int64_t decided = kPageBytes + plan.world_size * (kMaxTrainerStateBytes + 16) +
                          static_cast<int64_t>(plan.params.size()) * 11 + (int64_t{128} << 10);
  plan.memory.journal_bytes = 2 * RoundUp(decided, kPageBytes);
  if (HasSeveralOptimizers(plan.config.optimizer())) {
    plan.memory.undo_bytes = OldBytes(plan, HeldSlab::kShards, plan.memory.shards_bytes) +
                             OldBytes(plan, HeldSlab::kOptimizer, plan.memory.optimizer_bytes);
  }
  plan.memory.held_shards_bytes = HeldBytes(plan, HeldSlab::kShards, plan.memory.shards_bytes);
  plan.memory.held_gradients_bytes = HeldBytes(plan, HeldSlab::kGradients, plan.memory.gradients_bytes);
  plan.memory.held_optimizer_bytes = HeldBytes(plan, HeldSlab::kOptimizer, plan.memory.optimizer_bytes);
  plan.memory.held_parameters_bytes = HeldBytes(plan, HeldSlab::kParameters, plan.memory.parameters_bytes);
  plan.memory.held_kept_bytes = HeldBytes(plan, HeldSlab::kKept, plan.memory.kept_bytes);
  return absl::OkStatus();
}

}  // namespace plan_internal

int64_t FlatParamPlan::StateStrideBytes() const {
  return plan_internal::RoundUp(padded_numel * plan_internal::kFp32Bytes, kSlabAlignmentBytes);
}

namespace {

// Of a state that has less than the parameter, the segment's share.
int64_t StateBytesOf(const ShardPlan& plan, const FlatParamPlan& flat, const Segment& segment) {
  const int64_t numel = plan.params[segment.param].numel;
  int64_t bytes = 0;
  for (int state = 0; state < flat.optimizer_states; ++state) {
    const int64_t of_state = StateNumel(plan, segment.param, state);
    const double share = static_cast<double>(segment.numel) / static_cast<double>(numel);
    const int64_t has = of_state == numel ? segment.numel : std::llround(static_cast<double>(of_state) * share);
    bytes += has * plan_internal::kFp32Bytes;
  }
  return bytes;
}

}  // namespace

PlacedMemory PredictPlacedMemory(const ShardPlan& plan) {
  PlacedMemory most;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    PlacedMemory own;
    for (size_t f = 0; f < plan.flat_params.size(); ++f) {
      const FlatParamPlan& flat = plan.flat_params[f];
      const auto owned_numel = [&](Purpose purpose) {
        int64_t numel = 0;
        for (const Segment& segment : OwnedSegments(plan, purpose, static_cast<int>(f), rank)) {
          numel += segment.numel;
        }
        return numel;
      };
      own.parameters_bytes += owned_numel(Purpose::kParameters) * DTypeSizeBytes(flat.dtype);
      if (flat.requires_grad) {
        own.gradients_bytes += owned_numel(Purpose::kGradients) * plan_internal::kFp32Bytes;
        for (const Segment& segment : OwnedSegments(plan, Purpose::kOptimizer, static_cast<int>(f), rank)) {
          own.optimizer_bytes += StateBytesOf(plan, flat, segment);
        }
      }
    }
    most.parameters_bytes = std::max(most.parameters_bytes, own.parameters_bytes);
    most.gradients_bytes = std::max(most.gradients_bytes, own.gradients_bytes);
    most.optimizer_bytes = std::max(most.optimizer_bytes, own.optimizer_bytes);
  }
  // Memory beyond the shards; whole parameters in the stored dtype are the shards themselves.
  for (const FlatParamPlan& flat : plan.flat_params) {
    const GroupPlan& group = plan.groups[flat.group];
    const int cut = group.post_forward_shard_size;
    const bool in_shards = plan.placement.pieces(Purpose::kParameters) == 1 && flat.unsharded_dtype == flat.dtype;
    if (!in_shards && (!group.reshard_after_forward || cut < plan.placement.pieces(Purpose::kParameters))) {
      most.post_forward_bytes += (flat.padded_numel + cut - 1) / cut * DTypeSizeBytes(flat.unsharded_dtype);
    }
  }
  return most;
}

int64_t MemoryPlan::TotalBytes(int world_size) const {
  return held_shards_bytes + held_parameters_bytes + held_gradients_bytes + held_optimizer_bytes +
         unsharded_pool_bytes + gradient_staging_bytes + node_receive_bytes + held_kept_bytes + journal_bytes +
         undo_bytes + workspace_bytes + world_size * session_bytes;
}

int64_t MemoryPlan::TotalBytesOnGpus(int world_size) const {
  return TotalBytes(world_size) - node_receive_bytes - undo_bytes - workspace_bytes +
         world_size * gather_staging.stride_bytes;
}

}  // namespace shardd
