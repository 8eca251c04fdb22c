// Jobs whose parameters are cut over nodes: what each node holds, works on and has memory for.

#include "common/plan/node_part.h"

#include <map>
#include <vector>

#include "tests/common/plan/node_specs.h"

namespace shardd {
namespace {

// root(w) { a(w, bias, frozen, scalar) b(w bf16) }: rows that nodes do not divide, and fewer rows than ranks.
SpecBuilder Model(int nodes, int world_size, v1::Layout layout = v1::LAYOUT_FLAT,
                  v1::Strategy strategy = v1::STRATEGY_FULL_SHARD) {
  SpecBuilder b(world_size);
  b.config().set_strategy(strategy);
  b.config().set_layout(layout);
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  const int a = AddUnevenParams(&b);
  b.Param(a, "scalar", {});
  const int c = b.AddSharded(0, "b");
  b.Param(c, "w", {5, 64});
  AddNodes(&b, nodes);
  return b;
}

const v1::Layout kLayouts[] = {v1::LAYOUT_FLAT, v1::LAYOUT_DIM0};

TEST(NodePart, RanksOfManyNodesHoldWhatOneNodesRanksWould) {
  for (const v1::Layout layout : kLayouts) {
    for (const auto& [nodes, ranks] : {std::pair{2, 2}, {3, 1}, {2, 3}, {4, 1}}) {
      SpecBuilder all = Model(0, nodes * ranks, layout);
      const ShardPlan one = all.Plan();
      const SpecBuilder cut = Model(nodes, ranks, layout);
      for (int node = 0; node < nodes; ++node) {
        const ShardPlan plan = PlanOn(cut, node);
        ASSERT_TRUE(plan.cut_over_nodes);
        EXPECT_EQ(plan.digest, PlanOn(cut, 0).digest);
        for (int rank = 0; rank < ranks; ++rank) {
          for (size_t p = 0; p < one.params.size(); ++p) {
            for (const Purpose purpose : {Purpose::kParameters, Purpose::kGradients, Purpose::kOptimizer}) {
              const ParamRange want = OwnedRange(one, purpose, static_cast<int>(p), node * ranks + rank);
              const ParamRange got = OwnedRange(plan, purpose, static_cast<int>(p), rank);
              EXPECT_EQ(got.numel, want.numel) << one.params[p].fqn << " node " << node << " rank " << rank;
              EXPECT_TRUE(want.numel == 0 || got.first == want.first) << one.params[p].fqn;
            }
          }
        }
      }
    }
  }
}

TEST(NodePart, EachElementIsHeldAndWorkedOnByOneNode) {
  for (const v1::Layout layout : kLayouts) {
    for (const auto& [nodes, ranks] : {std::pair{2, 2}, {3, 1}, {5, 2}}) {
      const SpecBuilder b = Model(nodes, ranks, layout);
      const ShardPlan plan = PlanOn(b, 1);
      for (size_t g = 0; g < plan.groups.size(); ++g) {
        std::map<std::pair<int, int64_t>, int> held, worked;
        for (int node = 0; node < nodes; ++node) {
          int64_t last = -1;
          int last_flat = -1;
          for (const FlatRange& range : NodeRanges(plan, static_cast<int>(g), node)) {
            EXPECT_GT(range.numel, 0);
            EXPECT_TRUE(range.flat_param > last_flat || range.offset > last) << "ascending, none touches the next";
            last = range.offset + range.numel;
            last_flat = range.flat_param;
            for (int64_t i = 0; i < range.numel; ++i) ++held[{range.flat_param, range.offset + i}];
          }
          for (const int f : plan.groups[g].flat_params) {
            for (int rank = 0; rank < ranks; ++rank) {
              for (const Segment& segment : WorkSegmentsOn(plan, f, rank, node)) {
                for (int64_t i = 0; i < segment.numel; ++i) ++worked[{f, segment.offset + i}];
              }
            }
          }
        }
        EXPECT_EQ(held, worked);
        int64_t numel = 0;
        for (const int p : plan.groups[g].params) numel += plan.params[p].numel;
        EXPECT_EQ(static_cast<int64_t>(held.size()), numel);
        for (const auto& [element, times] : held) ASSERT_EQ(times, 1) << element.first << " " << element.second;
      }
    }
  }
}

TEST(NodePart, MemoryIsThatOfThePart) {
  for (const v1::Layout layout : kLayouts) {
    SpecBuilder b = Model(2, 2, layout);
    const int big = b.AddSharded(0, "big");
    b.Param(big, "w", {1024, 1024});
    const ShardPlan whole = [&] {
      SpecBuilder one = b;
      one.config().clear_nodes();
      one.config().set_unshard_mode(v1::UNSHARD_MODE_POOLED);
      return one.Plan();
    }();
    int64_t shards = 0, optimizer = 0;
    for (int node = 0; node < 2; ++node) {
      const ShardPlan plan = PlanOn(b, node);
      EXPECT_EQ(plan.config.unshard_mode(), v1::UNSHARD_MODE_POOLED);
      int64_t bytes = 0;
      int64_t end = -1;
      for (const ByteRange& range : HeldRanges(plan, HeldSlab::kOptimizer)) {
        EXPECT_GT(range.first, end);
        EXPECT_EQ(range.first % kHeldPageBytes + range.end % kHeldPageBytes, 0);
        end = range.end;
        bytes += range.end - range.first;
      }
      EXPECT_EQ(bytes, plan.memory.held_optimizer_bytes);
      EXPECT_NEAR(static_cast<double>(plan.memory.held_gradients_bytes),
                  static_cast<double>(whole.memory.gradients_bytes) / 2, 64 << 10);
      // Of everything else there is as much as ever, and what nodes need to add.
      const int64_t saved = whole.memory.shards_bytes - plan.memory.held_shards_bytes + whole.memory.gradients_bytes -
                            plan.memory.held_gradients_bytes + whole.memory.optimizer_bytes -
                            plan.memory.held_optimizer_bytes;
      EXPECT_NEAR(static_cast<double>(plan.memory.TotalBytes(2) - plan.memory.gradient_staging_bytes -
                                      plan.memory.node_receive_bytes),
                  static_cast<double>(whole.memory.TotalBytes(2) - saved), 64 << 10);
      EXPECT_GT(saved, 8 << 20);
      shards += plan.memory.held_shards_bytes;
      optimizer += plan.memory.held_optimizer_bytes;
    }
    EXPECT_NEAR(static_cast<double>(shards), static_cast<double>(whole.memory.shards_bytes), 128 << 10);
    EXPECT_NEAR(static_cast<double>(optimizer), static_cast<double>(whole.memory.optimizer_bytes), 128 << 10);
    EXPECT_EQ(whole.memory.held_shards_bytes, whole.memory.shards_bytes);
  }
}

TEST(NodePart, GatherStagingHasRoomForAGroupsParts) {
  EXPECT_EQ(Model(0, 2).Plan().memory.gather_staging.stride_bytes, 0);
  for (const v1::Layout layout : kLayouts) {
    for (int node = 0; node < 3; ++node) {
      SpecBuilder b = Model(3, 2, layout);
      b.config().mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
      b.Param(b.AddSharded(0, "big"), "w", {1024, 3072});
      const ShardPlan plan = PlanOn(b, node);
      const GatherStaging staging = plan.memory.gather_staging;
      // A sixth of the largest group in bf16, and what the other two nodes have for the same rank.
      EXPECT_NEAR(static_cast<double>(staging.own_bytes), 1 << 20, 8 << 10);
      EXPECT_NEAR(static_cast<double>(staging.slot_bytes), 2 << 20, 16 << 10);
      EXPECT_GE(staging.stride_bytes, staging.own_bytes + kGatherSlots * staging.slot_bytes + staging.greeting_bytes);
      EXPECT_EQ(staging.stride_bytes % kPoolAlignmentBytes, 0);
      int64_t bytes = 0;
      for (int other = 0; other < 3; ++other) {
        for (int rank = 0; rank < 2; ++rank) bytes += RailBytes(plan, plan.FindGroup("big"), other, rank);
      }
      EXPECT_EQ(bytes, 1024 * 3072 * 2);
    }
  }
}

TEST(NodePart, StagingHasRoomForThePartsOfAllNodes) {
  for (const v1::Layout layout : kLayouts) {
    const ShardPlan plan = PlanOn(Model(3, 2, layout), 0);
    for (size_t g = 0; g < plan.groups.size(); ++g) {
      int64_t of_node[3] = {};
      for (int rank = 0; rank < 2; ++rank) {
        int64_t of_rank = 0;
        for (int node = 0; node < 3; ++node) {
          for (const int f : plan.groups[g].flat_params) {
            if (!plan.flat_params[f].requires_grad) continue;
            for (const Segment& segment : WorkSegmentsOn(plan, f, rank, node)) {
              of_rank += (segment.numel * 4 + 63) / 64 * 64;
              of_node[node] += (segment.numel * 4 + 63) / 64 * 64;
            }
          }
        }
        EXPECT_LE(of_rank, plan.node_slot_bytes);
      }
      for (const int64_t bytes : of_node) EXPECT_LE(bytes, plan.node_piece_bytes);
    }
  }
}

TEST(NodePart, ANodeThatIsNotThereIsRefused) {
  SpecBuilder b = Model(2, 2);
  for (const int node : {-1, 2}) {
    EXPECT_EQ(PlanShards(b.spec(), node).status().code(), absl::StatusCode::kInvalidArgument) << node;
  }
  EXPECT_FALSE(PlanOn(Model(2, 2, v1::LAYOUT_FLAT, v1::STRATEGY_NO_SHARD), 1).cut_over_nodes);
  EXPECT_EQ(PlanOn(Model(2, 2, v1::LAYOUT_FLAT, v1::STRATEGY_NO_SHARD), 1).node, 0) << "the same plan on all nodes";
}

}  // namespace
}  // namespace shardd
