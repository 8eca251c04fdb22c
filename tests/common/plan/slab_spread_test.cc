// How slabs are divided over GPUs.

#include "common/plan/slab_spread.h"

#include <map>
#include <numeric>
#include <random>

#include "tests/common/plan/node_specs.h"
#include "tests/common/plan/random_spec.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kPage = 2 * kMiB;
constexpr SpreadSlab kAll[] = {SpreadSlab::kShards,    SpreadSlab::kParameters, SpreadSlab::kGradients,
                               SpreadSlab::kOptimizer, SpreadSlab::kPool,       SpreadSlab::kStaging,
                               SpreadSlab::kKept};

std::vector<std::pair<int, int64_t>> InPages(const std::vector<SlabPiece>& pieces) {
  std::vector<std::pair<int, int64_t>> result;
  for (const SlabPiece& piece : pieces) result.emplace_back(piece.gpu, piece.size_bytes / kPage);
  return result;
}

std::map<int, int64_t> BytesByGpu(const std::vector<SlabPiece>& pieces) {
  std::map<int, int64_t> result;
  for (const SlabPiece& piece : pieces) result[piece.gpu] += piece.size_bytes;
  return result;
}

// `groups` groups of so many MiB in fp32 each, AdamW in the daemon.
SpecBuilder Model(int world_size, int groups, int64_t mib) {
  SpecBuilder b(world_size);
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  for (int g = 0; g < groups; ++g) b.Param(b.AddSharded(0, absl::StrCat("g", g)), "w", {mib, kMiB / 4});
  return b;
}

TEST(SlabSpread, EachPageIsOnTheGpuWhoseRankUsesIt) {
  const ShardPlan plan = Model(2, 2, 16).Plan();
  EXPECT_THAT(InPages(SpreadOverGpus(plan, SpreadSlab::kShards, 2, kPage)),
              ElementsAre(std::pair(0, 4), std::pair(1, 4), std::pair(0, 4), std::pair(1, 4)));
  EXPECT_THAT(InPages(SpreadOverGpus(plan, SpreadSlab::kGradients, 2, kPage)),
              ElementsAre(std::pair(0, 4), std::pair(1, 4), std::pair(0, 4), std::pair(1, 4)));
  // Two states of each flat parameter.
  EXPECT_EQ(SpreadOverGpus(plan, SpreadSlab::kOptimizer, 2, kPage).size(), 8u);
  EXPECT_TRUE(SpreadOverGpus(plan, SpreadSlab::kParameters, 2, kPage).empty());
  EXPECT_TRUE(SpreadOverGpus(plan, SpreadSlab::kPool, 2, kPage).empty());
  EXPECT_THAT(InPages(SpreadOverGpus(plan, SpreadSlab::kShards, 1, kPage)), ElementsAre(std::pair(0, 16)));
}

TEST(SlabSpread, RanksTakeTurnsOverFewerGpus) {
  EXPECT_THAT(InPages(SpreadOverGpus(Model(4, 1, 16).Plan(), SpreadSlab::kShards, 2, kPage)),
              ElementsAre(std::pair(0, 2), std::pair(1, 2), std::pair(0, 2), std::pair(1, 2)));
}

TEST(SlabSpread, TheCastCopyIsDividedAsTheShardsAre) {
  SpecBuilder b = Model(2, 1, 16);
  b.config().mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
  EXPECT_THAT(InPages(SpreadOverGpus(b.Plan(), SpreadSlab::kParameters, 2, kPage)),
              ElementsAre(std::pair(0, 2), std::pair(1, 2)));
}

TEST(SlabSpread, EachPoolIsOnItsGpu) {
  SpecBuilder b = Model(4, 8, 3);
  b.config().set_unshard_mode(v1::UNSHARD_MODE_POOLED);
  b.config().set_unsharded_pools(2);
  const ShardPlan plan = b.Plan();
  ASSERT_EQ(plan.pools.size(), 2u);
  const std::vector<SlabPiece> pieces = SpreadOverGpus(plan, SpreadSlab::kPool, 2, kPage);
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].gpu, 0);
  EXPECT_EQ(pieces[0].size_bytes, plan.pools[1].offset_bytes);
  EXPECT_EQ(pieces[1].gpu, 1);
}

TEST(SlabSpread, SmallGroupsOnSharedPagesAreBalancedToOnePage) {
  for (const int gpus : {2, 3, 4}) {
    SpecBuilder b(4);
    for (int g = 0; g < 300; ++g) b.Param(b.AddSharded(0, absl::StrCat("g", g)), "w", {101, 257});
    const ShardPlan plan = b.Plan();
    const auto bytes = BytesByGpu(SpreadOverGpus(plan, SpreadSlab::kShards, gpus, kPage));
    ASSERT_EQ(bytes.size(), static_cast<size_t>(gpus));
    for (const auto& [gpu, size_bytes] : bytes) {
      const int ranks = (4 - gpu + gpus - 1) / gpus;
      EXPECT_NEAR(static_cast<double>(size_bytes), static_cast<double>(plan.memory.shards_bytes) * ranks / 4,
                  static_cast<double>(kPage))
          << gpu << " of " << gpus;
    }
  }
}

TEST(SlabSpread, PagesGrowWhereThereWouldBeTooManyPieces) {
  const ShardPlan plan = Model(4, 20, 16).Plan();
  EXPECT_EQ(SpreadOverGpus(plan, SpreadSlab::kShards, 4, kPage).size(), 80u);
  for (const int most : {79, 40, 7, 4, 1}) {
    const std::vector<SlabPiece> pieces = SpreadOverGpus(plan, SpreadSlab::kShards, 4, kPage, most);
    EXPECT_LE(pieces.size(), static_cast<size_t>(most));
    int64_t total_bytes = 0;
    for (const SlabPiece& piece : pieces) {
      EXPECT_EQ(piece.size_bytes % kPage, 0);
      total_bytes += piece.size_bytes;
    }
    EXPECT_EQ(total_bytes, plan.memory.shards_bytes);
    if (most >= 40) {
      EXPECT_EQ(BytesByGpu(pieces).size(), 4u) << most;
    }
  }
}

// A rank without a row of a small parameter, and one that works on nothing at all.
// The first of three nodes holds the first third of each group, and so on.
TEST(SlabSpread, PagesOfOtherNodesAreOnNoGpu) {
  SpecBuilder b = Model(2, 2, 24);
  b.config().set_strategy(v1::STRATEGY_FULL_SHARD);
  AddNodes(&b, 3);
  const std::vector<std::pair<int, int64_t>> wanted[] = {
      {{0, 2}, {1, 2}, {kNoGpu, 8}, {0, 2}, {1, 2}, {kNoGpu, 8}},
      {{0, 1}, {kNoGpu, 3}, {0, 2}, {1, 2}, {kNoGpu, 8}, {0, 2}, {1, 2}, {kNoGpu, 4}},
      {{0, 1}, {kNoGpu, 7}, {0, 2}, {1, 2}, {kNoGpu, 8}, {0, 2}, {1, 2}}};
  for (int node = 0; node < 3; ++node) {
    const ShardPlan plan = PlanOn(b, node);
    for (const SpreadSlab slab : {SpreadSlab::kShards, SpreadSlab::kGradients}) {
      for (const int gpus : {1, 2}) {
        int64_t size_bytes = 0;
        int64_t held_bytes = 0;
        const std::vector<SlabPiece> pieces = SpreadOverGpus(plan, slab, gpus, kPage);
        EXPECT_NE(pieces.front().gpu, kNoGpu);
        for (const SlabPiece& piece : pieces) {
          size_bytes += piece.size_bytes;
          held_bytes += piece.gpu == kNoGpu ? 0 : piece.size_bytes;
        }
        EXPECT_EQ(size_bytes, 48 * kMiB);
        EXPECT_EQ(held_bytes, 16 * kMiB + (node == 0 ? 0 : kPage)) << "and the first page";
        if (gpus == 2) {
          EXPECT_EQ(InPages(pieces), wanted[node]) << "node " << node;
        }
      }
    }
    for (const SpreadSlab slab : {SpreadSlab::kStaging, SpreadSlab::kGather}) {
      const std::vector<SlabPiece> pieces = SpreadOverGpus(plan, slab, 2, kPage);
      ASSERT_EQ(pieces.size(), 2u) << "one for each rank";
      EXPECT_EQ(pieces[0].size_bytes, pieces[1].size_bytes);
    }
  }
}

int GpuAt(const std::vector<SlabPiece>& pieces, int64_t offset_bytes) {
  for (const SlabPiece& piece : pieces) {
    if (offset_bytes < piece.size_bytes) return piece.gpu;
    offset_bytes -= piece.size_bytes;
  }
  return kNoGpu;
}

// Over nodes there are two, of which each follows shards by the state that trainers keep.
TEST(SlabSpread, BothSnapshotsAreWhereTheirShardsAndStatesAre) {
  for (const v1::Strategy strategy : {v1::STRATEGY_FULL_SHARD, v1::STRATEGY_HYBRID_SHARD}) {
    SpecBuilder b = Model(2, 2, 48);
    b.config().set_strategy(strategy);
    b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
    b.config().mutable_optimizer()->set_trainer_states(2);
    b.config().set_trainers_never_write(false);
    b.config().set_pass_copies(true);
    for (int node = 0; node < 3; ++node) b.config().mutable_nodes()->add_addresses(absl::StrCat("node", node, ":7000"));
    const ShardPlan plan = *PlanShards(b.spec(), 1);
    const MemoryPlan& memory = plan.memory;
    ASSERT_EQ(memory.kept_bytes, 2 * (memory.shards_bytes + memory.optimizer_bytes));
    const std::vector<SlabPiece> kept = SpreadOverGpus(plan, SpreadSlab::kKept, 2, kPage);
    int held = 0;
    const auto expect_alike = [&](SpreadSlab slab, int64_t size_bytes, int64_t begin_bytes) {
      const std::vector<SlabPiece> pieces = SpreadOverGpus(plan, slab, 2, kPage);
      for (int64_t at = 0; at < size_bytes; at += kPage) {
        // The first page of a slab is held, whoever has what it is for.
        const int gpu = at > 0 ? GpuAt(pieces, at) : GpuAt(kept, begin_bytes);
        EXPECT_EQ(GpuAt(kept, begin_bytes + at), gpu) << begin_bytes << " " << at;
        held += GpuAt(pieces, at) == kNoGpu ? 0 : 1;
      }
    };
    for (const int64_t begin_bytes : {int64_t{0}, memory.snapshot_bytes}) {
      expect_alike(SpreadSlab::kShards, memory.shards_bytes, begin_bytes);
      expect_alike(SpreadSlab::kOptimizer, memory.optimizer_bytes, begin_bytes + memory.shards_bytes);
    }
    EXPECT_GT(held, 0);
  }
}

TEST(SlabSpread, EmptyShardsTakeNothing) {
  SpecBuilder b(3);
  b.config().set_layout(v1::LAYOUT_DIM0);
  b.Param(0, "w", {2, 4 * kMiB});  // ranks 0 and 1 have a row of 16 MiB each
  EXPECT_THAT(InPages(SpreadOverGpus(b.Plan(), SpreadSlab::kShards, 3, kPage)),
              ElementsAre(std::pair(0, 8), std::pair(1, 8)));
}

TEST(SlabSpread, PiecesOfAnyPlanCoverTheSlabAndAreBalanced) {
  int spread = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    const absl::StatusOr<ShardPlan> plan = PlanShards(RandomSpec(seed).spec());
    if (!plan.ok()) continue;
    for (const SpreadSlab slab : kAll) {
      for (const int gpus : {1, 2, 4}) {
        if (gpus > plan->world_size) continue;
        SCOPED_TRACE(absl::StrCat("seed ", seed, " slab ", static_cast<int>(slab), " gpus ", gpus));
        const int64_t page = 256;  // so that random plans have many
        const std::vector<SlabPiece> pieces = SpreadOverGpus(*plan, slab, gpus, page);
        ASSERT_LE(pieces.size(), static_cast<size_t>(kMaxSlabPieces));
        int64_t total_bytes = 0;
        for (size_t i = 0; i < pieces.size(); ++i) {
          ASSERT_GT(pieces[i].size_bytes, 0);
          ASSERT_EQ(pieces[i].size_bytes % page, 0);
          ASSERT_TRUE(pieces[i].gpu >= 0 && pieces[i].gpu < gpus);
          if (i > 0) {
            ASSERT_NE(pieces[i].gpu, pieces[i - 1].gpu);
          }
          total_bytes += pieces[i].size_bytes;
        }
        const MemoryPlan& memory = plan->memory;
        const int64_t want[] = {memory.shards_bytes,    memory.parameters_bytes,     memory.gradients_bytes,
                                memory.optimizer_bytes, memory.unsharded_pool_bytes, memory.gradient_staging_bytes,
                                memory.kept_bytes};
        ASSERT_EQ(total_bytes, (want[static_cast<int>(slab)] + page - 1) / page * page);
        spread += pieces.size() > 1 ? 1 : 0;
      }
    }
  }
  EXPECT_GT(spread, 100);
}

}  // namespace
}  // namespace shardd
