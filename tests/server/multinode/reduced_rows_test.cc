// Rows of nodes that are replicas of each other: what node 0 compares of them, and what it adds up once.

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "server/multinode/given_gradients.h"
#include "server/multinode/param_mask.h"
#include "server/multinode/reduced_steps.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Two rows of two nodes of one rank. In dim0 the nodes with place 0 have all of "first", in flat those with place 1.
ShardPlan Plan(v1::Layout layout = v1::LAYOUT_DIM0) {
  SpecBuilder b(1);
  b.config().set_strategy(v1::STRATEGY_HYBRID_SHARD);
  b.config().set_layout(layout);
  b.config().set_shard_group_size(2);
  for (int node = 0; node < 4; ++node) {
    b.config().mutable_nodes()->add_addresses(absl::StrCat("host", node, ":7000"));
  }
  b.Param(0, "w", {64});
  b.Param(0, "first", {1, 8});
  return b.Plan();
}

class ReducedRows : public ::testing::Test {
 protected:
  ReducedRows() {
    for (int node = 0; node < 4; ++node) Say(node, {true, true}, node % 2 == 0 ? 9 : 16);
  }
  void Say(int node, const std::vector<bool>& present, double norm_sum) {
    v1::PeerMessage::Reduced& reduced = reduced_[static_cast<size_t>(node)];
    reduced.set_step(3);
    reduced.set_present(MaskOf(present));
    reduced.set_norm_scale(1);
    reduced.set_norm_sum(norm_sum);
  }
  void SayDigests(int node, const std::vector<uint64_t>& digests) {
    reduced_[static_cast<size_t>(node)].mutable_digests()->Assign(digests.begin(), digests.end());
  }
  absl::Status Compare() const { return Compare(plan_); }
  absl::Status Compare(const ShardPlan& plan) const {
    std::vector<const v1::PeerMessage::Reduced*> all;
    for (const v1::PeerMessage::Reduced& of_node : reduced_) all.push_back(&of_node);
    return CompareReduced(plan, all);
  }
  const ShardPlan plan_ = Plan();
  std::vector<v1::PeerMessage::Reduced> reduced_ = std::vector<v1::PeerMessage::Reduced>(4);
};

TEST_F(ReducedRows, TheNormCountsEachPartOnce) {
  EXPECT_DOUBLE_EQ(NormOverNodes(plan_, 2, reduced_).value(), 5);
  EXPECT_TRUE(Compare().ok()) << Compare();
}

TEST_F(ReducedRows, ANormOfAnotherRowThatDiffersIsNamed) {
  Say(3, {true, true}, 16.5);
  EXPECT_THAT(std::string(Compare().message()),
              AllOf(HasSubstr("Step 3: node 3 (host3:7000) is no replica of node 1 (host1:7000) any more"),
                    HasSubstr("got a sum of 16.5"), HasSubstr("go on from a checkpoint")));
}

TEST_F(ReducedRows, HoldersOfAllRowsMustHaveTheSameGradients) {
  Say(1, {true, false}, 16);  // it holds nothing of "first"
  EXPECT_TRUE(Compare().ok()) << Compare();
  EXPECT_THAT(PresentOnHolders(plan_, reduced_), ElementsAre(true, true));
  Say(2, {true, false}, 9);
  EXPECT_THAT(std::string(Compare().message()),
              HasSubstr("the gradient of \"first\" is dropped on node 2 (host2:7000) and there on node 0"));
}

// Node 0 holds none of it, so what it says is nothing to compare with.
TEST_F(ReducedRows, HoldersBeyondNode0AreComparedWithEachOther) {
  const ShardPlan plan = Plan(v1::LAYOUT_FLAT);
  for (const bool node2 : {false, true}) {
    Say(2, {true, node2}, 9);
    Say(3, {true, false}, 16);
    EXPECT_THAT(std::string(Compare(plan).message()),
                HasSubstr("the gradient of \"first\" is dropped on node 3 (host3:7000) and there on node 1"))
        << node2;
  }
  Say(0, {true, false}, 9);
  Say(3, {true, true}, 16);
  EXPECT_TRUE(Compare(plan).ok()) << Compare(plan);
}

TEST_F(ReducedRows, DigestsAreComparedByPlace) {
  ASSERT_EQ(DigestsOfNode(plan_), 4);
  for (int node = 0; node < 4; ++node) SayDigests(node, {1, 1, 7u + node % 2, 8});
  EXPECT_TRUE(Compare().ok()) << Compare();
  SayDigests(3, {1, 1, 9, 8});
  EXPECT_THAT(std::string(Compare().message()),
              AllOf(HasSubstr("node 3 (host3:7000) is no replica of node 1"), HasSubstr("\"w\" of group")));
  reduced_[1].clear_digests();  // its daemon is a new one
  EXPECT_TRUE(Compare().ok()) << Compare();
}

TEST_F(ReducedRows, WhoHoldsAParameterSaysWhetherItIsReplaced) {
  v1::PeerMessage::Go go;
  go.mutable_key()->set_group(0);
  const auto give = [&](bool w_fresh, bool first_fresh) {
    auto& gives = *go.add_gives();
    gives.set_present(MaskOf({true, true}));
    gives.set_fresh(MaskOf({w_fresh, first_fresh}));
  };
  give(true, false);
  give(true, true);  // it cannot tell of "first"
  give(true, false);
  give(true, false);
  const auto given = GivenByAll(plan_, go);
  ASSERT_TRUE(given.ok()) << given.status();
  EXPECT_THAT(given->fresh, ElementsAre(true, false));
}

}  // namespace
}  // namespace shardd
