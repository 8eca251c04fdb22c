// What of slabs has memory on the GPUs of a node, where parameters are cut over nodes: of real models' shapes.

#include "common/plan/slab_holes.h"

#include <algorithm>
#include <map>

#include "common/plan/largest_node.h"
#include "tests/common/plan/node_specs.h"

namespace shardd {
namespace {

constexpr SpreadSlab kCut[] = {SpreadSlab::kShards, SpreadSlab::kParameters, SpreadSlab::kGradients,
                               SpreadSlab::kOptimizer, SpreadSlab::kKept};

struct Shape {
  int layers;
  int64_t width;
  int64_t inner;
  int64_t vocabulary;
};
constexpr Shape kOf7B = {32, 4096, 11008, 32000};  // 291 parameters
constexpr Shape kOf70B = {80, 8192, 28672, 32000};

// Rows of each parameter over 8 nodes of 8 GPUs, as fully_shard cuts them; torch's Adam in the trainers.
SpecBuilder Model(const Shape& shape, v1::OptimizerKind kind) {
  SpecBuilder b(8);
  v1::JobConfig& config = b.config();
  config.set_layout(v1::LAYOUT_DIM0);
  config.set_strategy(v1::STRATEGY_FULL_SHARD);
  config.mutable_optimizer()->set_kind(kind);
  if (kind == v1::OPTIMIZER_KIND_TRAINER) {
    config.mutable_optimizer()->set_trainer_states(2);
    config.set_trainers_never_write(false);
    config.set_pass_copies(true);
  }
  AddNodes(&b, 8);
  b.Param(0, "embedding", {shape.vocabulary, shape.width});
  for (int layer = 0; layer < shape.layers; ++layer) {
    const int at = b.AddSharded(0, absl::StrCat("layer", layer));
    for (const char* name : {"q", "k", "v", "o"}) b.Param(at, name, {shape.width, shape.width});
    for (const char* name : {"gate", "up"}) b.Param(at, name, {shape.inner, shape.width});
    b.Param(at, "down", {shape.width, shape.inner});
    for (const char* name : {"norm1", "norm2"}) b.Param(at, name, {shape.width});
  }
  b.Param(0, "norm", {shape.width});
  b.Param(0, "head", {shape.vocabulary, shape.width});
  return b;
}

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
    const ShardPlan plan = PlanOn(Model(kOf7B, v1::OPTIMIZER_KIND_TRAINER), node);
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
  const ShardPlan plan = PlanOn(Model(kOf70B, v1::OPTIMIZER_KIND_ADAMW), 3);
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

TEST(SlabHoles, ThePlanForGpusSaysWhatSlabsHold) {
  for (const v1::OptimizerKind kind : {v1::OPTIMIZER_KIND_TRAINER, v1::OPTIMIZER_KIND_ADAMW}) {
    const ShardPlan plan = PlanOn(Model(kOf70B, kind), 7);
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
  SpecBuilder b = Model(kOf7B, v1::OPTIMIZER_KIND_ADAMW);
  const absl::StatusOr<LargestNode> largest = PlanLargestNode(b.spec(), /*on_gpus=*/true);
  ASSERT_TRUE(largest.ok()) << largest.status();
  EXPECT_EQ(largest->total_bytes, MemoryOnGpus(largest->plan, 8).TotalBytesOnGpus(8));
}

}  // namespace
}  // namespace shardd
