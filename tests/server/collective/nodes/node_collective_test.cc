// Sums over the ranks of several nodes: the same as of one collective over all of them.

#include "server/collective/nodes/node_collective.h"

#include "tests/common/plan/odd_params.h"
#include "tests/server/collective/nodes/node_collective_fixture.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

// Odd sizes, so that shards are uneven and, of few elements, empty; a frozen parameter; two groups.
SpecBuilder OddModel(int ranks, v1::Layout layout = v1::LAYOUT_FLAT, DType param_dtype = v1::DTYPE_UNSPECIFIED) {
  SpecBuilder builder(ranks);
  builder.config().set_strategy(v1::STRATEGY_HYBRID_SHARD);
  builder.config().set_layout(layout);
  builder.config().mutable_mixed_precision()->set_param_dtype(param_dtype);
  AddOddParams(&builder);
  return builder;
}

TEST_P(NodeCollectiveTest, EveryLayoutDtypeAndRankCountAddsUpOverNodes) {
  for (const v1::Layout layout : {v1::LAYOUT_FLAT, v1::LAYOUT_DIM0}) {
    for (const DType dtype : {v1::DTYPE_UNSPECIFIED, v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16}) {
      for (const auto& [ranks, nodes] : {std::pair(1, 2), std::pair(2, 2), std::pair(3, 2), std::pair(2, 3)}) {
        SCOPED_TRACE(
            absl::StrCat(v1::Layout_Name(layout), " ", DTypeName(dtype), " ranks: ", ranks, " nodes: ", nodes));
        Start(OddModel(ranks, layout, dtype), nodes);
        std::vector<Given> sums;
        for (int group = 0; group < static_cast<int>(plan_.groups.size()); ++group) sums.push_back(Everything(group));
        Check(sums);
      }
    }
  }
}

TEST_P(NodeCollectiveTest, ReplicasWithinANodeGetACopyOfTheSum) {
  SpecBuilder builder = OddModel(4, v1::LAYOUT_DIM0);
  builder.config().set_shard_group_size(2);
  builder.config().set_replica_copies(true);
  Start(builder, 2);
  ASSERT_EQ(plan_.gradient_copies, 2);
  Check({Everything(0), Everything(1)});
}

TEST_P(NodeCollectiveTest, OneNodesGradientsHaveTheBitsOfOneCollective) {
  for (const DType dtype : {v1::DTYPE_UNSPECIFIED, v1::DTYPE_BFLOAT16}) {
    for (const DType reduce : {v1::DTYPE_UNSPECIFIED, v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16}) {
      if (dtype == v1::DTYPE_UNSPECIFIED && reduce == v1::DTYPE_BFLOAT16) continue;  // sources are not rounded
      for (const bool keeps : {false, true}) {
        SCOPED_TRACE(absl::StrCat(DTypeName(dtype), " reduced in ", DTypeName(reduce), keeps ? ", kept" : ""));
        Start(OddModel(3, v1::LAYOUT_FLAT, dtype), 2);
        Given given = Everything(Group("a"));
        given.present[0].assign(3, Mask(given.group, false));
        given.odd_values = true;
        given.scale = 1.0f / 3;
        given.reduce_dtype = reduce;
        given.keep_low_precision = keeps;
        Given onto = given;
        onto.modes.assign(onto.modes.size(), GradientMode::kAccumulate);
        onto.seed = 7;
        Check({given, onto});
      }
    }
  }
}

TEST_P(NodeCollectiveTest, TheSumIsRoundedOnceAndItsSourcesAreNot) {
  Start(OddModel(2), 2);
  Given given = Everything(Group("a"));
  given.present[1][1] = Mask(given.group, false);
  given.scale = 1;
  given.reduce_dtype = v1::DTYPE_BFLOAT16;
  // Each would be 1 + 2^-7 in bf16, and three of them 3 + 2^-5; their sum is nearest to 3 + 2^-6.
  const float x = 1 + 0x1p-8f + 0x1p-12f;
  for (size_t node = 0; node < 2; ++node) {
    auto pending = std::make_shared<Pending>();
    ReduceScatterRequest request = Request(node, given, *pending);
    for (Bytes& slot : pending->slots) WriteSlot(plan_, slot, plan_.FindParam("a.bias"), std::vector<float>(7, x));
    Submit(node, std::move(request), pending);
  }
  Wait();
  for (const Node& node : nodes_) {
    EXPECT_EQ(ReadGradient(plan_, *node.gradients, plan_.FindParam("a.bias")), std::vector<float>(7, 3 + 0x1p-6f));
  }
}

TEST_P(NodeCollectiveTest, GradientsAccumulateOverBackwardsInTheirKeptDtype) {
  for (const bool keeps : {false, true}) {
    SCOPED_TRACE(keeps);
    Start(OddModel(3, v1::LAYOUT_DIM0, v1::DTYPE_BFLOAT16), 2);
    std::vector<Given> sums;
    for (int backward = 0; backward < 4; ++backward) {
      sums.push_back(Everything(Group("a"), backward == 0 ? GradientMode::kOverwrite : GradientMode::kAccumulate,
                                /*seed=*/backward));
      sums.back().keep_low_precision = keeps;
      sums.back().scale = 1.0f / 3;
    }
    // Some begin later.
    const auto late = static_cast<size_t>(Index("a.norm"));
    for (auto& node : sums[0].present) {
      for (auto& rank : node) rank[late] = false;
    }
    sums[1].modes[late] = GradientMode::kOverwrite;
    Check(sums);
  }
}

TEST_P(NodeCollectiveTest, NodesGiveDifferentParametersAndSomeNothing) {
  for (const v1::Layout layout : {v1::LAYOUT_FLAT, v1::LAYOUT_DIM0}) {
    Start(OddModel(3, layout), 3);
    Given given = Everything(Group("a"));
    const auto weight = static_cast<size_t>(Index("a.weight")), bias = static_cast<size_t>(Index("a.bias")),
               norm = static_cast<size_t>(Index("a.norm"));
    for (auto& rank : given.present[0]) rank[weight] = false;  // of other nodes alone
    given.present[1].assign(3, Mask(given.group, false));      // a node that gives nothing
    for (auto& rank : given.present[2]) rank[norm] = false;    // of this one alone
    given.present[0][1][norm] = false;                         // and there not of all
    for (auto& node : given.present) {
      for (auto& rank : node) rank[bias] = false;  // nobody's
    }
    Check({given});
  }
}

TEST_P(NodeCollectiveTest, AnEmptySumIsInTheSequenceButNotExchanged) {
  Start(OddModel(2), 2);
  Given given = Everything(Group("a"));
  for (auto& node : given.present) node.assign(2, Mask(given.group, false));
  for (Pending* pending : Submit(given)) EXPECT_TRUE(Await(pending).ok());
  ExpectUntouched();
  EXPECT_TRUE(switch_->calls(0).empty());
  Check({Everything(Group("a"))});
}

TEST_P(NodeCollectiveTest, ZerosComeBeforeTheSumsAndWhereThereIsNone) {
  Start(OddModel(2), 2);
  const Given given = Everything(Group("a"), GradientMode::kAccumulate);
  *reference_gradients_ = Bytes(reference_.memory.gradients_bytes, 0);
  Refer(given);
  const FlatParamPlan& root = plan_.flat_params[static_cast<size_t>(plan_.groups[0].flat_params[0])];
  for (size_t node = 0; node < 2; ++node) {
    auto pending = std::make_shared<Pending>();
    ReduceScatterRequest request = Request(node, given, *pending);
    request.zeros.resize(2);
    char* const gradients = nodes_[node].gradients->data();
    for (const int f : plan_.groups[static_cast<size_t>(given.group)].flat_params) {
      const FlatParamPlan& flat = plan_.flat_params[static_cast<size_t>(f)];
      for (int rank = 0; rank < 2 && flat.requires_grad; ++rank) {
        for (const Segment& segment : WorkSegments(plan_, f, rank)) {
          request.zeros[static_cast<size_t>(rank)].emplace_back(
              ZeroOp{gradients + flat.gradients_offset_bytes + segment.offset * 4, segment.numel * 4});
        }
      }
    }
    request.zeros[1].emplace_back(ZeroOp{gradients + root.gradients_offset_bytes, 4});
    Submit(node, std::move(request), pending);
  }
  Wait();
  for (const Node& node : nodes_) {
    EXPECT_EQ(ReadGradient(plan_, *node.gradients, plan_.FindParam("scale")), std::vector<float>(1, 0));
    for (const char* name : {"a.weight", "a.bias", "a.norm", "a.gain"}) {
      EXPECT_EQ(ReadGradient(plan_, *node.gradients, plan_.FindParam(name)),
                ReadGradient(reference_, *reference_gradients_, reference_.FindParam(name)))
          << name;
    }
  }
}

TEST_P(NodeCollectiveTest, SumsAreWrittenInTheirOrderWhateverEndsFirst) {
  Start(OddModel(3), 2);
  std::vector<Given> sums;
  for (int backward = 0; backward < 16; backward += 2) {
    switch_->Hold(true);
    for (int i = 0; i < kNodeSlots; ++i) {
      // The first of each two is written over, so what comes before it must be there before.
      sums.push_back(
          Everything(Group("a"), i == 0 ? GradientMode::kOverwrite : GradientMode::kAccumulate, backward + i));
      Submit(sums.back());
      Refer(sums.back());
    }
    for (int node = 0; node < 2; ++node) switch_->AwaitCalls(node, sums.size());
    switch_->Hold(false);
    Wait();
    ExpectAsReferred(sums);
  }
  EXPECT_GT(switch_->out_of_order(), 0) << "of the exchange";
}

TEST_P(NodeCollectiveTest, ManySumsAreUnderWayButOnlyTwoInStaging) {
  SpecBuilder builder = OddModel(3);
  for (int i = 0; i < 6; ++i) builder.Param(builder.AddSharded(0, absl::StrCat("b", i)), "w", {17 + i, 5});
  Start(builder, 3);
  switch_->Hold(true);
  std::vector<Given> sums;
  for (int backward = 0; backward < 4; ++backward) {
    for (int group = 0; group < static_cast<int>(plan_.groups.size()); ++group) {
      sums.push_back(Everything(group, backward == 0 ? GradientMode::kOverwrite : GradientMode::kAccumulate, backward));
      Submit(sums.back());
      Refer(sums.back());
    }
  }
  for (int node = 0; node < 3; ++node) {
    switch_->AwaitCalls(node, kNodeSlots);
    EXPECT_EQ(switch_->calls(node).size(), static_cast<size_t>(kNodeSlots));
    for (const auto& device : nodes_[static_cast<size_t>(node)].devices) {
      EXPECT_LE(device->records().size(), static_cast<size_t>(kNodeSlots)) << "what waits has been begun";
    }
  }
  ExpectUntouched();
  switch_->Hold(false);
  for (const auto& pending : pending_) EXPECT_TRUE(Await(pending.get()).ok()) << pending->status;
  ExpectAsReferred(sums);
}

TEST_P(NodeCollectiveTest, ALaterSumThatIsReadyAwaitsTheEarlierOne) {
  SpecBuilder builder(2);
  builder.config().set_strategy(v1::STRATEGY_HYBRID_SHARD);
  const int a = builder.AddSharded(0, "a");
  builder.Param(a, "first", {64});  // rank 0's
  builder.Param(a, "last", {64});   // rank 1's
  Start(builder, 2);
  std::vector<Given> sums(2, Everything(Group("a")));
  for (auto& node : sums[0].present) {
    for (auto& rank : node) rank[static_cast<size_t>(Index("a.last"))] = false;
  }
  for (auto& node : sums[1].present) {
    for (auto& rank : node) rank[static_cast<size_t>(Index("a.first"))] = false;
  }
  absl::Notification goes_on;
  devices_[0]->Submit(StreamId::kPostBackward,
                      {"block", {}, [&](const absl::Status&) { goes_on.WaitForNotificationWithTimeout(kLimit); }});
  for (const Given& given : sums) Submit(given);
  absl::Notification drained;
  devices_[1]->Submit(StreamId::kPostBackward, {"drain", {}, [&](const absl::Status&) { drained.Notify(); }});
  drained.WaitForNotification();
  EXPECT_TRUE(switch_->calls(0).empty()) << "the sum of rank 1's device is there, that of rank 0's not";
  goes_on.Notify();
  Wait();
  for (const Given& given : sums) Refer(given);
  ExpectAsReferred(sums);
}

SHARDD_FOR_EACH_NODE_DEVICE(NodeCollectiveTest);

}  // namespace
}  // namespace shardd
