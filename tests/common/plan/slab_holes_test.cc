// What of slabs has memory on the GPUs of a node, where parameters are cut over nodes: of real models' shapes.

#include "common/plan/slab_holes.h"

#include <algorithm>
#include <map>

#include "common/plan/largest_node.h"
#include "tests/common/plan/node_specs.h"
#include "tests/common/plan/random_spec.h"
#include "tests/common/plan/real_models.h"

namespace shardd {
namespace {

constexpr SpreadSlab kCut[] = {SpreadSlab::kShards, SpreadSlab::kParameters, SpreadSlab::kGradients,
                               SpreadSlab::kOptimizer, SpreadSlab::kKept};

struct Spread {
  int64_t held_bytes = 0;
  size_t pieces = 0;
  std::map<int, int64_t> by_gpu;
};

Spread SpreadOf(const ShardPlan& plan, SpreadSlab slab, int max_pieces) {
  Spread spread;
  for (const SlabPiece& piece : SpreadOverGpus(plan, slab, 8, kGpuPageBytes, max_pieces)) {
    ++spread.pieces;
    if (piece.gpu == kNoGpu) continue;
    spread.held_bytes += piece.size_bytes;
    spread.by_gpu[piece.gpu] += piece.size_bytes;
  }
  return spread;
}

// Of what this node holds, in pages of 4 KiB.
int64_t WantedBytes(const MemoryPlan& memory, SpreadSlab slab) {
  return slab == SpreadSlab::kShards       ? memory.held_shards_bytes
         : slab == SpreadSlab::kParameters ? memory.held_parameters_bytes
         : slab == SpreadSlab::kGradients  ? memory.held_gradients_bytes
         : slab == SpreadSlab::kOptimizer  ? memory.held_optimizer_bytes
                                           : memory.held_kept_bytes;
}

void ExpectBalanced(const Spread& spread) {
  ASSERT_EQ(spread.by_gpu.size(), 8u);
  for (const auto& [gpu, bytes] : spread.by_gpu) {
    EXPECT_NEAR(static_cast<double>(bytes), static_cast<double>(spread.held_bytes) / 8,
                static_cast<double>(kGpuPageBytes))
        << gpu;
  }
}

TEST(SlabHoles, SlabsOfModelsTakeLittleMoreThanTheNodesPart) {
  for (const int node : {0, 5}) {
    const ShardPlan plan = PlanOn(ModelOf(kOf7B, v1::OPTIMIZER_KIND_TRAINER), node);
    for (const SpreadSlab slab : kCut) {
      SCOPED_TRACE(absl::StrCat("node ", node, " slab ", static_cast<int>(slab)));
      const int most = MaxPieces(plan, slab);
      EXPECT_EQ(most, slab == SpreadSlab::kKept ? 6 * kMaxSlabPieces : kMaxSlabPieces);
      const Spread spread = SpreadOf(plan, slab, most);
      EXPECT_LE(spread.pieces, static_cast<size_t>(most));
      EXPECT_LE(spread.held_bytes, WantedBytes(plan.memory, slab) * 3 / 2) << WantedBytes(plan.memory, slab);
      ExpectBalanced(spread);
    }
  }
}

// Which GPU has a page is made coarse first, and then the smallest holes are filled.
TEST(SlabHoles, ShortOfPiecesSlabsTakeNoMultiple) {
  const ShardPlan plan = PlanOn(ModelOf(kOf70B, v1::OPTIMIZER_KIND_ADAMW), 3);
  for (const SpreadSlab slab : {SpreadSlab::kShards, SpreadSlab::kGradients}) {
    const Spread spread = SpreadOf(plan, slab, kMaxSlabPieces);
    EXPECT_LE(spread.held_bytes, WantedBytes(plan.memory, slab) * 8 / 5) << static_cast<int>(slab);
    ExpectBalanced(spread);
  }
  int64_t fuller_bytes = plan.memory.shards_bytes + kGpuPageBytes;
  for (const int most : {8, 9, 16, 100, 300, 1024, 4096}) {
    SCOPED_TRACE(most);
    const Spread spread = SpreadOf(plan, SpreadSlab::kShards, most);
    EXPECT_LE(spread.pieces, static_cast<size_t>(most));
    EXPECT_LE(spread.held_bytes, fuller_bytes) << "more pieces, less memory";
    fuller_bytes = spread.held_bytes;
    ExpectBalanced(spread);
  }
}

// Whatever is cut, and however few files there are: trainers map as many pieces as they take, holes counted, and there
// is memory for all that this node holds.
TEST(SlabHoles, AnyCutPlanHasPiecesWithinItsLimit) {
  constexpr int64_t kPage = 256;  // so that random plans have many
  int with_holes = 0;
  for (uint32_t seed = 0; seed < 200; ++seed) {
    v1::JobSpec spec = RandomSpec(seed).spec();
    spec.mutable_config()->set_strategy(v1::STRATEGY_FULL_SHARD);
    for (int node = 0; node < 3; ++node) {
      spec.mutable_config()->mutable_nodes()->add_addresses(absl::StrCat("node", node, ":7000"));
    }
    const absl::StatusOr<ShardPlan> plan = PlanShards(spec, static_cast<int>(seed % 3));
    if (!plan.ok() || !plan->cut_over_nodes) continue;
    const std::pair<SpreadSlab, HeldSlab> cut[] = {{SpreadSlab::kShards, HeldSlab::kShards},
                                                   {SpreadSlab::kGradients, HeldSlab::kGradients},
                                                   {SpreadSlab::kOptimizer, HeldSlab::kOptimizer}};
    for (const auto& [slab, held] : cut) {
      for (const int most : {plan->world_size, plan->world_size + 1, 12, 40, kMaxSlabPieces}) {
        SCOPED_TRACE(absl::StrCat("seed ", seed, " slab ", static_cast<int>(slab), " most ", most));
        const int gpus = std::min(plan->world_size, most);
        const std::vector<SlabPiece> pieces = SpreadOverGpus(*plan, slab, gpus, kPage, most);
        ASSERT_LE(pieces.size(), static_cast<size_t>(most));
        if (pieces.empty()) continue;
        ASSERT_NE(pieces.front().gpu, kNoGpu) << "it is known by its first piece";
        std::vector<ByteRange> holes;
        int64_t at_bytes = 0;
        for (const SlabPiece& piece : pieces) {
          if (piece.gpu == kNoGpu) holes.push_back({at_bytes, at_bytes + piece.size_bytes});
          at_bytes += piece.size_bytes;
        }
        ASSERT_EQ(at_bytes, SlabBytesOnGpus(*plan, slab, kPage));
        with_holes += holes.empty() ? 0 : 1;
        for (const ByteRange& range : HeldRanges(*plan, held, kPage)) {
          for (const ByteRange& hole : holes) {
            ASSERT_TRUE(range.end <= hole.first || range.first >= hole.end);
          }
        }
      }
    }
  }
  EXPECT_GT(with_holes, 100);
}

TEST(SlabHoles, ThePlanForGpusSaysWhatSlabsHold) {
  for (const v1::OptimizerKind kind : {v1::OPTIMIZER_KIND_TRAINER, v1::OPTIMIZER_KIND_ADAMW}) {
    const ShardPlan plan = PlanOn(ModelOf(kOf70B, kind), 7);
    const MemoryPlan memory = MemoryOnGpus(plan, 8);
    int64_t more_bytes = 0;
    for (const SpreadSlab slab : kCut) {
      EXPECT_EQ(WantedBytes(memory, slab), SpreadOf(plan, slab, MaxPieces(plan, slab)).held_bytes)
          << static_cast<int>(slab);
      more_bytes += WantedBytes(memory, slab) - WantedBytes(plan.memory, slab);
    }
    EXPECT_GT(more_bytes, 0);
    EXPECT_EQ(memory.TotalBytesOnGpus(8), plan.memory.TotalBytesOnGpus(8) + more_bytes);
  }
  SpecBuilder b = ModelOf(kOf7B, v1::OPTIMIZER_KIND_ADAMW);
  const absl::StatusOr<LargestNode> largest = PlanLargestNode(b.spec(), /*on_gpus=*/true);
  ASSERT_TRUE(largest.ok()) << largest.status();
  EXPECT_EQ(largest->total_bytes, MemoryOnGpus(largest->plan, 8).TotalBytesOnGpus(8));
}

}  // namespace
}  // namespace shardd
