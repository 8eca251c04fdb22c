// Where flat parameters lie in slabs and slots, and the memory that a job is predicted to take.

#include "common/plan/session_layout.h"
#include "common/shm/page.h"
#include "common/shm/ring.h"
#include "common/shm/sum_ring.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kMiB = int64_t{1} << 20;

std::vector<int> SlotsOf(const ShardPlan& plan) {
  std::vector<int> slots;
  for (const GroupPlan& group : plan.groups) {
    slots.push_back(group.gradient_slot);
  }
  return slots;
}

// Flat parameters of 1 MiB in fp32 per group: root and `groups` below it.
SpecBuilder Model(int world_size, int groups) {
  SpecBuilder b(world_size);
  b.Param(0, "w", {kMiB / 4});
  for (int g = 0; g < groups; ++g) {
    b.Param(b.AddSharded(0, absl::StrCat("g", g)), "w", {kMiB / 4});
  }
  return b;
}

TEST(Memory, OfAPlainJobIsShardsGradientsOptimizerAndSessions) {
  SpecBuilder b = Model(2, 3);
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  const ShardPlan plan = b.Plan();
  EXPECT_EQ(plan.memory.shards_bytes, 4 * kMiB);
  EXPECT_EQ(plan.memory.parameters_bytes, 0);
  EXPECT_EQ(plan.memory.gradients_bytes, 4 * kMiB);
  EXPECT_EQ(plan.memory.optimizer_bytes, 8 * kMiB);
  EXPECT_EQ(plan.memory.unsharded_pool_bytes, 0);
  EXPECT_EQ(plan.memory.gradient_slots_bytes, 3 * kMiB) << "one for the root, two below";
  EXPECT_GE(plan.memory.journal_bytes, 2 * 2 * kMaxTrainerStateBytes) << "two steps of two ranks";
  EXPECT_EQ(plan.memory.TotalBytes(2), 16 * kMiB + plan.memory.journal_bytes + 2 * plan.memory.session_bytes);
  EXPECT_EQ(plan.flat_params[2].shards_offset_bytes, 2 * kMiB);
  EXPECT_EQ(plan.flat_params[2].optimizer_offset_bytes, 4 * kMiB);
  EXPECT_EQ(plan.flat_params[2].StateStrideBytes(), kMiB);
  EXPECT_EQ(plan.flat_params[2].params_offset_bytes, -1);
  EXPECT_EQ(plan.flat_params[2].pool_offset_bytes, -1);
}

TEST(Memory, OnlyWhatParamDtypeLowersGetsACastCopy) {
  SpecBuilder b(2);
  b.config().mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
  b.Param(0, "a", {kMiB});
  b.Param(0, "b", {kMiB}, {.dtype = v1::DTYPE_BFLOAT16});
  b.Param(0, "c", {kMiB}, {.dtype = v1::DTYPE_INT8, .requires_grad = false});
  const ShardPlan plan = b.Plan();
  EXPECT_EQ(plan.memory.shards_bytes, (4 + 2 + 1) * kMiB);
  EXPECT_EQ(plan.memory.parameters_bytes, 2 * kMiB);
  EXPECT_EQ(plan.flat_params[0].params_offset_bytes, 0);
  EXPECT_EQ(plan.flat_params[1].params_offset_bytes, -1);
  EXPECT_EQ(plan.flat_params[2].params_offset_bytes, -1);
  EXPECT_EQ(plan.memory.gradient_slots_bytes, (2 + 2) * kMiB) << "gradients come in the unsharded dtype";
  EXPECT_EQ(plan.memory.gradients_bytes, (4 + 4) * kMiB) << "and are kept in fp32";
}

TEST(Memory, PassCopiesOfAllThatTrainersWriteAreTheSnapshot) {
  SpecBuilder b(2);
  b.config().set_trainers_never_write(false);
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
  b.Param(0, "a", {kMiB}, {.requires_grad = false});
  b.Param(0, "b", {kMiB}, {.dtype = v1::DTYPE_BFLOAT16, .requires_grad = false});
  const ShardPlan plan = b.Plan();
  EXPECT_EQ(plan.memory.kept_bytes, 0);
  EXPECT_EQ(plan.memory.parameters_bytes, plan.memory.shards_bytes);
  for (const FlatParamPlan& flat : plan.flat_params) {
    EXPECT_EQ(flat.params_offset_bytes, flat.shards_offset_bytes);
  }
  b.config().mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
  EXPECT_EQ(b.Plan().memory.kept_bytes, plan.memory.shards_bytes) << "a cast cannot be undone";
  b.config().clear_mixed_precision();
  b.config().mutable_optimizer()->set_trainer_states(2);
  b.Param(0, "c", {kMiB});
  const ShardPlan trained = b.Plan();
  EXPECT_EQ(trained.memory.kept_bytes, trained.memory.shards_bytes + trained.memory.optimizer_bytes);
}

TEST(Memory, PassCopiesHoldEverythingInTheDtypeThatIsRead) {
  SpecBuilder b(2);
  b.config().set_trainers_never_write(false);
  b.config().set_pass_copies(true);
  b.config().mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
  b.Param(0, "a", {kMiB});
  b.Param(0, "b", {kMiB}, {.dtype = v1::DTYPE_BFLOAT16});
  b.Param(0, "c", {kMiB}, {.dtype = v1::DTYPE_INT8, .requires_grad = false});
  for (const v1::UnshardMode mode : {v1::UNSHARD_MODE_ZERO_COPY, v1::UNSHARD_MODE_POOLED}) {
    b.config().set_unshard_mode(mode);
    const ShardPlan plan = b.Plan();
    EXPECT_EQ(plan.memory.parameters_bytes, (2 + 2 + 1) * kMiB);
    EXPECT_EQ(plan.flat_params[0].params_offset_bytes, 0);
    EXPECT_EQ(plan.flat_params[1].params_offset_bytes, 2 * kMiB);
    EXPECT_EQ(plan.flat_params[2].params_offset_bytes, 4 * kMiB);
    EXPECT_EQ(plan.flat_params[1].unsharded_dtype, plan.flat_params[1].dtype);
    EXPECT_EQ(plan.memory.kept_bytes, plan.memory.shards_bytes);
    b.config().set_pass_copies(false);
    EXPECT_EQ(plan.memory.TotalBytes(2) - b.Plan().memory.TotalBytes(2),
              (mode == v1::UNSHARD_MODE_POOLED ? 5 : 3) * kMiB);
    b.config().set_pass_copies(true);
  }
}

TEST(Memory, PooledHasNoCastCopyButAPool) {
  SpecBuilder b = Model(2, 3);
  b.config().set_unshard_mode(v1::UNSHARD_MODE_POOLED);
  b.config().mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
  const ShardPlan plan = b.Plan();
  EXPECT_EQ(plan.memory.parameters_bytes, 0);
  for (const FlatParamPlan& flat : plan.flat_params) {
    EXPECT_EQ(flat.params_offset_bytes, -1);
    EXPECT_EQ(flat.pool_offset_bytes, 0);
  }
  // Root and one group at once, two more in flight: all four groups, so that two ranks need no more than one each.
  EXPECT_EQ(plan.pool_quota, 2 + 2);
  EXPECT_EQ(plan.pool_slots, 4);
  EXPECT_EQ(plan.pool_slot_bytes, kMiB / 2);
  EXPECT_EQ(plan.memory.unsharded_pool_bytes, 2 * kMiB);
}

// The host casts, once for each version, and that is what is copied to GPUs.
TEST(Memory, OffloadPlansPoolsWithStagingAndACastCopy) {
  SpecBuilder b = Model(2, 3);
  b.config().set_offload(v1::OFFLOAD_HOST);
  b.config().mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
  const ShardPlan plan = b.Plan();
  EXPECT_EQ(plan.config.unshard_mode(), v1::UNSHARD_MODE_POOLED);
  int64_t largest_bytes = 0;
  int64_t end_bytes = 0;
  for (const FlatParamPlan& flat : plan.flat_params) {
    EXPECT_EQ(flat.params_offset_bytes, end_bytes);
    EXPECT_EQ(flat.pool_offset_bytes, 0);
    end_bytes += 2 * flat.padded_numel;
    largest_bytes = std::max(largest_bytes, 4 * flat.padded_numel);
  }
  EXPECT_EQ(plan.memory.parameters_bytes, end_bytes);
  EXPECT_EQ(plan.staging_bytes, largest_bytes);
  EXPECT_EQ(plan.memory.gradient_staging_bytes, largest_bytes);
  b.config().set_unsharded_pools(2);
  const ShardPlan two = b.Plan();
  EXPECT_EQ(two.staging_bytes, largest_bytes);
  EXPECT_EQ(two.staging_stride_bytes % kPoolAlignmentBytes, 0) << "each on the pages of its GPU";
  EXPECT_EQ(two.memory.gradient_staging_bytes, 2 * two.staging_stride_bytes);
  EXPECT_EQ(two.memory.TotalBytes(2) - plan.memory.TotalBytes(2),
            two.memory.gradient_staging_bytes - plan.memory.gradient_staging_bytes + two.memory.unsharded_pool_bytes -
                plan.memory.unsharded_pool_bytes);
}

TEST(Memory, StagingIsNeverMoreThanACopyCanUse) {
  SpecBuilder b(1);
  b.Param(0, "w", {1 << 26});
  b.config().set_offload(v1::OFFLOAD_HOST);
  EXPECT_EQ(b.Plan().memory.gradient_staging_bytes, 32 * kMiB);
}

TEST(Memory, WithManyGroupsThePoolHasEveryRanksQuota) {
  SpecBuilder b = Model(2, 20);
  b.config().set_unshard_mode(v1::UNSHARD_MODE_POOLED);
  const ShardPlan plan = b.Plan();
  EXPECT_EQ(plan.pool_quota, 2 + 2);
  EXPECT_EQ(plan.pool_slots, 2 * (2 + 2));
}

TEST(Memory, PoolsHoldTheirRanksQuotasAndStartOnGpuPages) {
  SpecBuilder b = Model(5, 20);
  b.config().set_unshard_mode(v1::UNSHARD_MODE_POOLED);
  b.config().set_unsharded_pools(2);
  const ShardPlan plan = b.Plan();
  ASSERT_EQ(plan.pools.size(), 2u);
  EXPECT_EQ(plan.pools[0].slots, 3 * plan.pool_quota) << "ranks 0, 2 and 4";
  EXPECT_EQ(plan.pools[1].slots, 2 * plan.pool_quota) << "ranks 1 and 3";
  EXPECT_EQ(plan.pool_slots, 5 * plan.pool_quota);
  EXPECT_EQ(plan.pools[0].offset_bytes, 0);
  EXPECT_EQ(plan.pools[1].offset_bytes % kPoolAlignmentBytes, 0);
  EXPECT_GE(plan.pools[1].offset_bytes, plan.pools[0].slots * plan.pool_slot_bytes);
  EXPECT_GE(plan.memory.unsharded_pool_bytes, plan.pools[1].offset_bytes + plan.pools[1].slots * plan.pool_slot_bytes);
  EXPECT_EQ(plan.memory.unsharded_pool_bytes % kPoolAlignmentBytes, 0);
  b.config().set_unsharded_pools(6);
  EXPECT_EQ(PlanShards(b.spec()).status().code(), absl::StatusCode::kInvalidArgument) << "more than ranks";
  b.config().set_unshard_mode(v1::UNSHARD_MODE_ZERO_COPY);
  b.config().set_unsharded_pools(1);
  EXPECT_EQ(PlanShards(b.spec()).status().code(), absl::StatusCode::kInvalidArgument) << "there is no pool";
}

TEST(Memory, ThePoolHoldsAllGroupsThatAreNotResharded) {
  SpecBuilder b = Model(2, 3);
  const int before = static_cast<int>(b.spec().tree().modules_size());
  for (int g = 0; g < 20; ++g) {  // so that the number of groups is no limit
    b.Param(b.AddSharded(0, absl::StrCat("resharded", g)), "w", {8});
    b.module(before + g).set_reshard_after_forward(v1::OVERRIDE_YES);
  }
  b.config().set_unshard_mode(v1::UNSHARD_MODE_POOLED);
  b.config().set_strategy(v1::STRATEGY_SHARD_GRAD_OP);
  b.config().set_max_inflight_unshards(1);
  EXPECT_EQ(b.Plan().pool_quota, 5 + 1) << "root, g0, g1, g2, one of the others, one in flight";
  b.module(1).set_reshard_after_forward(v1::OVERRIDE_YES);
  b.module(2).set_reshard_after_forward(v1::OVERRIDE_YES);
  EXPECT_EQ(b.Plan().pool_quota, 3 + 1) << "root, g2, one of the others, one in flight";
}

TEST(Memory, ThePoolHoldsTheGroupsOfTiedParametersToo) {
  SpecBuilder b;
  b.config().set_unshard_mode(v1::UNSHARD_MODE_POOLED);
  b.config().set_max_inflight_unshards(1);
  b.Param(b.AddSharded(0, "first"), "w", {8});
  b.Param(b.AddSharded(0, "embedding"), "w", {8}, {.storage_id = 1});
  b.Param(b.AddSharded(0, "block"), "w", {8});
  const int head = b.AddSharded(0, "head");
  b.Param(head, "bias", {8});
  b.Param(head, "w", {8}, {.storage_id = 1});
  EXPECT_EQ(b.Plan().pool_quota, 2 + 1) << "head, embedding, one in flight";
}

TEST(Memory, SgdPlansAMomentumBufferOnlyWhereAsked) {
  SpecBuilder b = Model(1, 0);
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  EXPECT_EQ(b.Plan().optimizer_states, 0);
  EXPECT_EQ(b.Plan().memory.optimizer_bytes, 0);
  EXPECT_EQ(b.Plan().flat_params[0].optimizer_offset_bytes, -1);
  b.config().mutable_optimizer()->set_momentum(true);
  EXPECT_EQ(b.Plan().optimizer_states, 1);
  EXPECT_EQ(b.Plan().memory.optimizer_bytes, kMiB);
}

TEST(Memory, FrozenParametersTakeNoGradientsNoStateAndNoSlot) {
  SpecBuilder b;
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  b.Param(0, "w", {1000}, {.requires_grad = false});
  const ShardPlan plan = b.Plan();
  EXPECT_EQ(plan.memory.gradients_bytes + plan.memory.optimizer_bytes + plan.memory.gradient_slots_bytes, 0);
  EXPECT_EQ(plan.groups[0].gradient_slot, -1);
  EXPECT_EQ(plan.flat_params[0].slot_offset_bytes, -1);
  EXPECT_EQ(plan.flat_params[0].gradients_offset_bytes, -1);
}

TEST(GradientSlots, NeighboursAlternateAndNestedGroupsNeverShare) {
  SpecBuilder b;
  b.Param(0, "w", {10});
  const int a = b.AddSharded(0, "a");
  b.Param(a, "w", {100000});
  b.Param(b.AddSharded(a, "inner"), "w", {10});
  b.Param(b.AddSharded(0, "frozen"), "w", {10}, {.requires_grad = false});
  b.Param(b.AddSharded(0, "b"), "w", {300001});
  b.Param(b.AddSharded(0, "c"), "w", {200000});
  const ShardPlan plan = b.Plan();
  // (root), a, a.inner, frozen, b, c
  EXPECT_THAT(SlotsOf(plan), ElementsAre(0, 1, 3, -1, 2, 1));
  ASSERT_EQ(plan.gradient_slots.size(), 4u);
  EXPECT_EQ(plan.gradient_slots[1].size_bytes, 800000) << "the larger of a and c";
  EXPECT_EQ(plan.gradient_slots[2].size_bytes, 1200064) << "b, in whole cache lines";
  int64_t end_bytes = 0;
  for (const SlotPlan& slot : plan.gradient_slots) {
    EXPECT_EQ(slot.offset_bytes % 4096, 0);
    EXPECT_GE(slot.offset_bytes, end_bytes);
    end_bytes = slot.offset_bytes + slot.size_bytes;
  }
  EXPECT_GE(plan.memory.gradient_slots_bytes, end_bytes);
}

TEST(GradientSlots, SmallGroupsShareAsLittleAsAMebibyteAllows) {
  SpecBuilder b;
  b.Param(0, "w", {10});
  for (int g = 0; g < 5; ++g) {
    b.Param(b.AddSharded(0, absl::StrCat("g", g)), "w", {kMiB / 4 / 5 - 1024});
  }
  EXPECT_THAT(SlotsOf(b.Plan()), ElementsAre(0, 1, 2, 3, 4, 5));
  b.Param(b.AddSharded(0, "larger"), "w", {kMiB / 4 / 3 - 1024});
  EXPECT_THAT(SlotsOf(b.Plan()), ElementsAre(0, 1, 2, 3, 1, 2, 3)) << "three of the largest fit, in whole pages";
  EXPECT_LE(b.Plan().memory.gradient_slots_bytes, kMiB + 2 * 4096);
}

TEST(SessionLayoutTest, PartsLieOneAfterTheOtherOnPageBoundaries) {
  SpecBuilder b = Model(2, 3);
  for (int i = 0; i < 17; ++i) {
    b.Param(0, absl::StrCat("p", i), {1});
  }
  const ShardPlan plan = b.Plan();
  const SessionLayout layout = MakeSessionLayout(plan);
  EXPECT_GE(layout.ring_offset_bytes, static_cast<int64_t>(sizeof(ClientPage)));
  EXPECT_GE(layout.masks_offset_bytes, layout.ring_offset_bytes + kRingBytes);
  ASSERT_EQ(layout.mask_offset_bytes.size(), 4u);
  EXPECT_THAT(layout.mask_size_bytes, ElementsAre(3, 1, 1, 1));
  EXPECT_EQ(layout.mask_offset_bytes[0], layout.masks_offset_bytes);
  for (size_t g = 1; g < layout.mask_offset_bytes.size(); ++g) {
    EXPECT_GE(layout.mask_offset_bytes[g], layout.mask_offset_bytes[g - 1] + 2 * layout.mask_size_bytes[g - 1]);
  }
  EXPECT_GE(layout.payload_offset_bytes, layout.mask_offset_bytes[3] + 2 * layout.mask_size_bytes[3]);
  EXPECT_GE(layout.slots_offset_bytes, layout.payload_offset_bytes + kStepPayloadBytes);
  EXPECT_GE(layout.memory_bytes, layout.slots_offset_bytes + plan.memory.gradient_slots_bytes);
  for (int64_t offset_bytes : {layout.ring_offset_bytes, layout.masks_offset_bytes, layout.payload_offset_bytes,
                               layout.slots_offset_bytes, layout.memory_bytes, layout.daemon_page_bytes}) {
    EXPECT_EQ(offset_bytes % 4096, 0);
  }
  EXPECT_GE(layout.daemon_page_bytes,
            static_cast<int64_t>(offsetof(DaemonPage, tail) + plan.gradient_slots.size() * sizeof(SlotEntry) +
                                 plan.groups.size() * sizeof(GroupEntry)));
  EXPECT_EQ(plan.memory.session_bytes, layout.memory_bytes + layout.daemon_page_bytes);
  EXPECT_EQ(layout.sum_words_offset_bytes, 0);
  EXPECT_EQ(layout.sum_ring_offset_bytes, 0);

  b.config().set_trainer_sums(true);
  const ShardPlan summed = b.Plan();
  const SessionLayout with_sums = MakeSessionLayout(summed);
  EXPECT_EQ(with_sums.sum_words_offset_bytes, layout.slots_offset_bytes);
  EXPECT_EQ(with_sums.slots_offset_bytes, layout.slots_offset_bytes + 4096) << "a page of its own: a GPU writes there";
  EXPECT_EQ(with_sums.sum_ring_offset_bytes, layout.daemon_page_bytes);
  EXPECT_GE(with_sums.daemon_page_bytes, layout.daemon_page_bytes + static_cast<int64_t>(sizeof(SumRing)));
  EXPECT_EQ(with_sums.daemon_page_bytes % 4096, 0);
  EXPECT_EQ(summed.memory.session_bytes, with_sums.memory_bytes + with_sums.daemon_page_bytes);
}

}  // namespace
}  // namespace shardd
