// Jobs over several nodes: what is refused, and what their plan has that others' have not.

#include <string>
#include <vector>

#include "common/plan/node_part.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPage = 4096;

std::vector<std::string> Addresses(int count) {
  std::vector<std::string> addresses;
  for (int node = 0; node < count; ++node) addresses.push_back(absl::StrCat("node", node, ":7000"));
  return addresses;
}

void SetNodes(SpecBuilder& b, const std::vector<std::string>& addresses) {
  *b.config().mutable_nodes()->mutable_addresses() = {addresses.begin(), addresses.end()};
}

// root(w) { a(w, bias, frozen) }
SpecBuilder Model(int world_size, int nodes) {
  SpecBuilder b(world_size);
  b.config().set_strategy(v1::STRATEGY_HYBRID_SHARD);
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  b.Param(0, "w", {2048});
  const int a = b.AddSharded(0, "a");
  b.Param(a, "w", {64, 256});
  b.Param(a, "bias", {7});
  b.Param(a, "frozen", {1 << 20}, {.requires_grad = false});
  if (nodes > 0) SetNodes(b, Addresses(nodes));
  return b;
}

TEST(Nodes, AddressesThatNameNoNodesAreRefusedByName) {
  const auto refused = [](const std::vector<std::string>& addresses, const std::vector<std::string>& fragments) {
    SpecBuilder b = Model(2, 0);
    b.config().mutable_nodes();
    SetNodes(b, addresses);
    return Invalid(b.spec(), fragments);
  };
  EXPECT_TRUE(refused({}, {"nodes.addresses", "got 0 addresses", "want 2 to 64"}));
  EXPECT_TRUE(refused(Addresses(1), {"nodes.addresses", "got 1 addresses"}));
  EXPECT_TRUE(refused(Addresses(65), {"nodes.addresses", "got 65 addresses"}));
  EXPECT_TRUE(refused({"a:1", "b:1", "a:1"}, {"nodes.addresses", "given twice", "got \"a:1\""}));
  EXPECT_TRUE(refused({"a:1", ""}, {"nodes.addresses", "empty", "want \"host:port\""}));
  EXPECT_TRUE(refused({"a:1", std::string(257, 'x')}, {"nodes.addresses", "too long", std::string(256, 'x')}));
  EXPECT_TRUE(refused({"a:1", "b:1\n"}, {"nodes.addresses", "got \"b:1\\n\""}));
  EXPECT_TRUE(refused({"a:1, b:1", "c:1"}, {"nodes.addresses", "got \"a:1, b:1\""})) << "one text of two lists";
  EXPECT_TRUE(refused({"a:1,b:1", "c:1"}, {"nodes.addresses", "got \"a:1,b:1\""}));
  EXPECT_EQ(Model(2, 64).Plan().nodes(), 64);
}

TEST(Nodes, WhatIsNotServedTogetherIsRefusedByName) {
  const auto refused = [](auto&& change, const std::vector<std::string>& fragments) {
    SpecBuilder b = Model(2, 2);
    change(b.config());
    return Refused(b.spec(), absl::StatusCode::kUnimplemented, fragments);
  };
  for (const v1::Strategy strategy : {v1::STRATEGY_FULL_SHARD, v1::STRATEGY_SHARD_GRAD_OP}) {
    EXPECT_TRUE(refused(
        [&](v1::JobConfig& c) {
          c.set_strategy(strategy);
          c.mutable_placement()->set_parameters(v1::SPREAD_REPLICATED);
        },
        {"plan config nodes", "got placement SPREAD_REPLICATED with " + v1::Strategy_Name(strategy)}));
    EXPECT_TRUE(refused(
        [&](v1::JobConfig& c) {
          c.set_strategy(strategy);
          c.set_unshard_mode(v1::UNSHARD_MODE_ZERO_COPY);
        },
        {"plan config nodes", "got unshard_mode UNSHARD_MODE_ZERO_COPY", "want UNSHARD_MODE_POOLED"}));
  }
  EXPECT_TRUE(refused(
      [](v1::JobConfig& c) {
        c.set_trainers_never_write(false);
        c.set_pass_copies(true);
      },
      {"plan config nodes", "got pass_copies true", "trainers_never_write false", "want pass_copies false"}));
  EXPECT_TRUE(refused(
      [](v1::JobConfig& c) {
        c.set_trainers_never_write(false);
        c.set_replica_copies(true);
      },
      {"plan config nodes", "with edits in place", "got replica_copies true"}));
  EXPECT_TRUE(refused([](v1::JobConfig& c) { c.set_offload(v1::OFFLOAD_HOST); },
                      {"plan config nodes", "got OFFLOAD_HOST", "want OFFLOAD_NONE"}));
  EXPECT_TRUE(refused([](v1::JobConfig& c) { c.set_trainer_sums(true); },
                      {"plan config nodes", "got trainer_sums true", "want false"}));
  for (const v1::Strategy strategy :
       {v1::STRATEGY_HYBRID_SHARD, v1::STRATEGY_HYBRID_SHARD_ZERO2, v1::STRATEGY_NO_SHARD}) {
    SpecBuilder b = Model(2, 2);
    b.config().set_strategy(strategy);
    EXPECT_EQ(b.Plan().nodes(), 2) << v1::Strategy_Name(strategy);
  }
}

TEST(Nodes, Float8OfWhatIsNotGatheredOverNodesIsRefused) {
  for (const int nodes : {0, 2}) {
    SpecBuilder b = Model(2, nodes);
    b.config().mutable_mixed_precision()->set_float8_gathers(true);
    EXPECT_TRUE(Refused(b.spec(), absl::StatusCode::kUnimplemented,
                        {"plan group \"(root)\": mixed_precision.float8_gathers", "no parameters cross nodes",
                         nodes == 0 ? "on 1 node" : "on 2 nodes, each with whole copies", "STRATEGY_FULL_SHARD"}));
  }
  SpecBuilder b = Model(2, 2);
  b.spec().mutable_tree()->mutable_modules(1)->mutable_mixed_precision()->set_float8_gathers(true);
  EXPECT_TRUE(
      Refused(b.spec(), absl::StatusCode::kUnimplemented, {"plan group \"a\": mixed_precision.float8_gathers"}));
  b.config().set_strategy(v1::STRATEGY_FULL_SHARD);
  EXPECT_TRUE(b.Plan().groups[1].mixed_precision.float8_gathers());
}

TEST(Nodes, Float8OfParametersThatAreReadInFp64IsRefused) {
  SpecBuilder b = Model(2, 2);
  b.config().set_strategy(v1::STRATEGY_FULL_SHARD);
  b.config().mutable_mixed_precision()->set_float8_gathers(true);
  b.Param(0, "wide", {9}, {.dtype = v1::DTYPE_FLOAT64, .requires_grad = false});
  b.Param(0, "ids", {9}, {.dtype = v1::DTYPE_INT64, .requires_grad = false});
  EXPECT_TRUE(Refused(
      b.spec(), absl::StatusCode::kUnimplemented,
      {"plan group \"(root)\": mixed_precision.float8_gathers: parameter \"wide\"", "got float64", "set param_dtype"}));
  b.config().mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
  const ShardPlan plan = b.Plan();
  for (size_t f = 0; f < plan.flat_params.size(); ++f) {
    EXPECT_EQ(IsFloat8(plan, static_cast<int>(f)), plan.flat_params[f].dtype != v1::DTYPE_INT64);
  }
}

TEST(Nodes, Float8IsInTheDigestAndNamedWhereItDiffers) {
  SpecBuilder b = Model(2, 2);
  b.config().set_strategy(v1::STRATEGY_FULL_SHARD);
  const std::string digest = b.Plan().digest;
  SpecBuilder of_job = b;
  of_job.config().mutable_mixed_precision()->set_float8_gathers(true);
  EXPECT_NE(of_job.Plan().digest, digest);
  EXPECT_THAT(FirstDifference(of_job.spec(), b.spec()),
              HasSubstr("config mixed_precision.float8_gathers differs (got true, want false)"));
  SpecBuilder of_module = b;
  of_module.spec().mutable_tree()->mutable_modules(1)->mutable_mixed_precision()->set_float8_gathers(true);
  EXPECT_NE(of_module.Plan().digest, digest);
  EXPECT_THAT(FirstDifference(of_module.spec(), b.spec()), HasSubstr("as submitted, float8 gathers, want"));
}

TEST(Nodes, EditsThatAreWrittenBackTakeNoSnapshot) {
  SpecBuilder b = Model(2, 2);
  EXPECT_FALSE(b.Plan().writes_edits_back());
  b.config().set_trainers_never_write(false);
  EXPECT_TRUE(b.Plan().writes_edits_back());
  EXPECT_EQ(b.Plan().memory.kept_bytes, 0);
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
  EXPECT_FALSE(b.Plan().writes_edits_back());
  EXPECT_GT(b.Plan().memory.kept_bytes, 0);
}

TEST(Nodes, GradientsAreDividedByTheRanksOfAllNodes) {
  EXPECT_EQ(Model(3, 0).Plan().config.gradient_divide_factor(), 3);
  EXPECT_EQ(Model(3, 4).Plan().config.gradient_divide_factor(), 12);
  SpecBuilder b = Model(3, 4);
  b.config().set_gradient_divide_factor(5);
  EXPECT_EQ(b.Plan().config.gradient_divide_factor(), 5);
}

// What a rank may have to add of one group, padding between its segments included.
int64_t LargestPart(const ShardPlan& plan) {
  int64_t most = 0;
  for (const GroupPlan& group : plan.groups) {
    for (int rank = 0; rank < plan.world_size; ++rank) {
      int64_t bytes = 0;
      for (const int f : group.flat_params) {
        if (!plan.flat_params[f].requires_grad) continue;
        for (const Segment& segment : WorkSegments(plan, f, rank)) bytes += (segment.numel * 4 + 63) / 64 * 64;
      }
      most = std::max(most, bytes);
    }
  }
  return most;
}

TEST(Nodes, EveryRankCanStageTwoPartsOfTheLargestGroup) {
  for (const v1::Layout layout : {v1::LAYOUT_FLAT, v1::LAYOUT_DIM0}) {
    for (const int world_size : {1, 2, 3}) {
      SpecBuilder b = Model(world_size, 2);
      b.config().set_layout(layout);
      const ShardPlan plan = b.Plan();
      SCOPED_TRACE(absl::StrCat(v1::Layout_Name(layout), " ranks: ", world_size));
      const int64_t part_bytes = LargestPart(plan);
      EXPECT_GE(part_bytes, (64 * 256 + 7) * 4 / world_size) << "a's share, without what is frozen";
      EXPECT_EQ(plan.node_slot_bytes, (part_bytes + kPage - 1) / kPage * kPage);
      EXPECT_EQ(plan.staging_bytes, 2 * plan.node_slot_bytes);
      EXPECT_EQ(plan.staging_count(), world_size);
      EXPECT_GE(plan.staging_stride_bytes, plan.staging_bytes);
      EXPECT_EQ(plan.staging_stride_bytes % kPoolAlignmentBytes, 0);
    }
  }
}

TEST(Nodes, NodesAddOnlyStagingAndMemoryForWhatOthersSend) {
  const ShardPlan one = Model(3, 0).Plan();
  EXPECT_EQ(one.nodes(), 1);
  EXPECT_EQ(one.node_slot_bytes, 0);
  EXPECT_EQ(one.staging_bytes, 0);
  EXPECT_EQ(one.memory.gradient_staging_bytes, 0);
  EXPECT_EQ(one.memory.node_receive_bytes, 0);
  for (const int nodes : {2, 3, 64}) {
    const ShardPlan plan = Model(3, nodes).Plan();
    EXPECT_EQ(plan.memory.gradient_staging_bytes, 3 * plan.staging_stride_bytes);
    const int64_t received = plan.memory.node_receive_bytes;
    EXPECT_EQ(received % kPage, 0);
    EXPECT_GE(received, 2 * (nodes - 1) * 3 * plan.node_slot_bytes / nodes) << "a part of each slot from each other";
    EXPECT_LE(received, 2 * (nodes - 1) * (3 * plan.node_slot_bytes / nodes + 1 + kPage));
    EXPECT_EQ(plan.memory.TotalBytes(3) - one.memory.TotalBytes(3),
              plan.memory.gradient_staging_bytes + plan.memory.node_receive_bytes);
  }
}

// Old bytes of what parts of steps change: of all that a node has, which is a replica or its part.
TEST(Nodes, SeveralOptimizersHaveRoomForOldBytesOnEachNode) {
  const auto several = [](v1::Strategy strategy) {
    SpecBuilder b = Model(2, 2);
    b.config().set_strategy(strategy);
    for (const char* const fqn : {"w", "a.w"}) {
      v1::OptimizerConfig::Group& group = *b.config().mutable_optimizer()->add_groups();
      group.add_fqns(fqn);
      group.set_kind(v1::OPTIMIZER_KIND_ADAMW);
    }
    return b.Plan().memory;
  };
  const MemoryPlan replica = several(v1::STRATEGY_HYBRID_SHARD), part = several(v1::STRATEGY_FULL_SHARD);
  EXPECT_EQ(replica.undo_bytes, replica.shards_bytes + replica.optimizer_bytes);
  EXPECT_GE(part.undo_bytes, part.held_shards_bytes + part.held_optimizer_bytes);
  EXPECT_LT(part.undo_bytes, part.held_shards_bytes + part.held_optimizer_bytes + 16 * kUndoChunkBytes);
  EXPECT_LT(part.undo_bytes, replica.undo_bytes);
}

TEST(Nodes, DifferingNodesChangeThePlanAndAreNamed) {
  const SpecBuilder two = Model(2, 2), three = Model(2, 3), none = Model(2, 0);
  SpecBuilder swapped = Model(2, 0);
  SetNodes(swapped, {"node1:7000", "node0:7000"});
  EXPECT_EQ(two.Plan().digest, Model(2, 2).Plan().digest);
  for (const SpecBuilder& other : {three, none, swapped}) EXPECT_NE(two.Plan().digest, other.Plan().digest);

  const auto difference = [](SpecBuilder got, SpecBuilder want) { return FirstDifference(got.spec(), want.spec()); };
  EXPECT_EQ(difference(two, two), "");
  EXPECT_THAT(difference(swapped, two), HasSubstr("config nodes.addresses differs"));
  EXPECT_THAT(difference(swapped, two), HasSubstr("got node1:7000, node0:7000, want node0:7000, node1:7000"));
  // Also where the default of the divide factor differs.
  EXPECT_THAT(difference(three, two), HasSubstr("config nodes.addresses differs (got node0:7000, node1:7000, node2"));
  EXPECT_THAT(difference(none, two), HasSubstr("config nodes.addresses differs (got , want node0:7000, node1:7000)"));
}

}  // namespace
}  // namespace shardd
