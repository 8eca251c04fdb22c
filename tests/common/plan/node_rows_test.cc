// Shard groups that span nodes: rows of nodes that have one copy each (common/plan/node_part.h).

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "common/plan/node_part.h"
#include "tests/common/plan/node_specs.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

const v1::Layout kLayouts[] = {v1::LAYOUT_FLAT, v1::LAYOUT_DIM0};

// Rows that nodes do not divide, fewer rows than ranks, and something frozen.
SpecBuilder Model(int nodes, int world_size, int shard_group_size, v1::Layout layout = v1::LAYOUT_FLAT,
                  v1::Strategy strategy = v1::STRATEGY_HYBRID_SHARD) {
  SpecBuilder b(world_size);
  b.config().set_strategy(strategy);
  b.config().set_layout(layout);
  b.config().set_shard_group_size(shard_group_size);
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  AddUnevenParams(&b);
  AddNodes(&b, nodes);
  return b;
}

TEST(NodeRows, ANodeHoldsWhatItWouldInAJobOfOneRow) {
  for (const v1::Layout layout : kLayouts) {
    for (const auto& [nodes, row, ranks] : {std::array{4, 2, 2}, {4, 2, 1}, {6, 3, 2}, {6, 2, 1}}) {
      const SpecBuilder rows = Model(nodes, ranks, row * ranks, layout);
      SpecBuilder one = Model(row, ranks, 0, layout, v1::STRATEGY_FULL_SHARD);
      for (int node = 0; node < nodes; ++node) {
        const ShardPlan got = PlanOn(rows, node);
        const ShardPlan want = PlanOn(one, node % row);
        EXPECT_TRUE(got.cut_over_nodes && HasRows(got));
        EXPECT_EQ(NodesOfRow(got), row);
        EXPECT_EQ(got.node, node % row);
        EXPECT_EQ(got.digest, PlanOn(rows, 0).digest);
        EXPECT_EQ(got.config.unshard_mode(), v1::UNSHARD_MODE_POOLED);
        EXPECT_EQ(got.config.gradient_divide_factor(), nodes * ranks);
        EXPECT_EQ(got.memory.held_shards_bytes, want.memory.held_shards_bytes);
        EXPECT_EQ(got.memory.held_optimizer_bytes, want.memory.held_optimizer_bytes);
        EXPECT_EQ(got.node_slot_bytes, want.node_slot_bytes);
        for (int p = 0; p < static_cast<int>(got.params.size()); ++p) {
          for (int rank = 0; rank < ranks; ++rank) {
            const ParamRange a = OwnedRange(got, Purpose::kOptimizer, p, rank);
            const ParamRange b = OwnedRange(want, Purpose::kOptimizer, p, rank);
            EXPECT_TRUE(a.first == b.first && a.numel == b.numel) << got.params[static_cast<size_t>(p)].fqn;
          }
          for (int other = 0; other < nodes; ++other) {
            const ParamRange a = NodeRangeOf(got, p, other);
            const ParamRange b = NodeRangeOf(want, p, other % row);
            EXPECT_TRUE(a.first == b.first && a.numel == b.numel) << got.params[static_cast<size_t>(p)].fqn;
          }
        }
      }
    }
  }
}

TEST(NodeRows, NodesOfOnePlaceShareTheMemoryToAdd) {
  const ShardPlan rows = PlanOn(Model(4, 2, 4), 0);
  const ShardPlan one = PlanOn(Model(4, 2, 0, v1::LAYOUT_FLAT, v1::STRATEGY_FULL_SHARD), 0);
  // A node adds a fourth of everything, whether it keeps that alone or half of what it keeps.
  EXPECT_LE(rows.node_piece_bytes, one.node_piece_bytes + 64 * kSlabAlignmentBytes);
  EXPECT_GE(rows.node_piece_bytes * 4, rows.world_size * rows.node_slot_bytes / 2);
}

TEST(NodeRows, ZeRO2KeepsParametersFromForwardToBackward) {
  const ShardPlan plan = PlanOn(Model(4, 2, 4, v1::LAYOUT_FLAT, v1::STRATEGY_HYBRID_SHARD_ZERO2), 3);
  EXPECT_TRUE(HasRows(plan));
  EXPECT_FALSE(plan.groups[1].reshard_after_forward);
}

TEST(NodeRows, OtherJobsHaveNone) {
  const ShardPlan within = PlanOn(Model(4, 2, 2), 3);
  EXPECT_FALSE(within.cut_over_nodes || HasRows(within));
  EXPECT_EQ(NodesOfRow(within), 1);
  const ShardPlan cut = PlanOn(Model(4, 2, 0, v1::LAYOUT_FLAT, v1::STRATEGY_FULL_SHARD), 3);
  EXPECT_TRUE(cut.cut_over_nodes && !HasRows(cut));
  EXPECT_EQ(NodesOfRow(cut), 4);
}

struct RefusedCase {
  const char* name;
  int nodes;
  int size;
  void (*change)(v1::JobConfig&);
  const char* text;
};
class RefusedRows : public ::testing::TestWithParam<RefusedCase> {};

TEST_P(RefusedRows, NamesWhatItWants) {
  const RefusedCase& refused = GetParam();
  SpecBuilder b = Model(refused.nodes, 2, refused.size);
  if (refused.change != nullptr) refused.change(b.config());
  const absl::StatusOr<ShardPlan> plan = PlanShards(b.spec(), 0);
  ASSERT_FALSE(plan.ok());
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr(refused.text));
}

INSTANTIATE_TEST_SUITE_P(
    , RefusedRows,
    ::testing::Values(
        RefusedCase{"HalfANode", 4, 3, nullptr, "spans nodes and does not end with one (got 3 ranks"},
        RefusedCase{"AllNodes", 4, 8, nullptr, "use STRATEGY_FULL_SHARD"},
        RefusedCase{"AllNodesZero2", 4, 8,
                    [](v1::JobConfig& config) { config.set_strategy(v1::STRATEGY_HYBRID_SHARD_ZERO2); },
                    "use STRATEGY_SHARD_GRAD_OP"},
        RefusedCase{"MoreThanAllNodes", 4, 16, nullptr, "does not divide the nodes into rows (got 16 ranks"},
        RefusedCase{"UnevenRows", 4, 6, nullptr, "those of 3 nodes, and 4 nodes, want a divisor of these)"},
        RefusedCase{"NoNodes", 0, 4, nullptr, "is no divisor of the world size"},
        RefusedCase{"Copies", 4, 4, [](v1::JobConfig& config) { config.set_replica_copies(true); },
                    "replica_copies: each node holds its part once"},
        RefusedCase{"OverTheWorld", 4, 4,
                    [](v1::JobConfig& config) { config.mutable_placement()->set_optimizer(v1::SPREAD_WORLD); },
                    "what is cut over nodes is cut alike (got placement SPREAD_WORLD with STRATEGY_HYBRID_SHARD"},
        RefusedCase{"ZeroCopy", 4, 4,
                    [](v1::JobConfig& config) { config.set_unshard_mode(v1::UNSHARD_MODE_ZERO_COPY); },
                    "what other nodes hold is gathered into the unsharded pool"},
        RefusedCase{"ListedGroups", 4, 0,
                    [](v1::JobConfig& config) {
                      for (int rank = 0; rank < 4; ++rank) {
                        if (rank == 0) config.add_shard_groups();
                        config.mutable_shard_groups(0)->add_ranks(rank);
                      }
                    },
                    "more ranks are listed than the job has"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace shardd
