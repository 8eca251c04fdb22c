// Flat parameters, padding, shard ranges and per-rank metadata, on cases small enough to check by hand.

#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

struct Range {
  std::string fqn;
  int64_t first = 0;  // element of the parameter
  int64_t numel = 0;
  bool operator==(const Range& other) const { return fqn == other.fqn && first == other.first && numel == other.numel; }
  friend void PrintTo(const Range& range, std::ostream* out) {
    *out << range.fqn << "[" << range.first << ", +" << range.numel << ")";
  }
};

std::vector<Range> ShardOf(const ShardPlan& plan, int flat_param, int rank) {
  std::vector<Range> ranges;
  const absl::StatusOr<ShardMetadata> metadata = GetShardMetadata(plan, flat_param, rank);
  EXPECT_TRUE(metadata.ok()) << metadata.status();
  for (const ShardMetadata::Piece& piece : metadata->pieces) {
    ranges.push_back({plan.params[piece.param].fqn, piece.first, piece.numel});
  }
  return ranges;
}

int64_t Padding(const ShardPlan& plan, int flat_param, int rank) {
  return GetShardMetadata(plan, flat_param, rank)->padding_numel;
}

TEST(FlatParam, ThereIsOnePerDtypeAndRequiresGradInOrder) {
  SpecBuilder b;
  b.Param(0, "a", {3}, {.dtype = v1::DTYPE_BFLOAT16});
  b.Param(0, "frozen", {3}, {.requires_grad = false});
  b.Param(0, "b", {3});
  b.Param(0, "c", {3}, {.dtype = v1::DTYPE_BFLOAT16});
  b.Param(0, "steps", {}, {.dtype = v1::DTYPE_INT64, .requires_grad = false});
  const ShardPlan plan = b.Plan();
  ASSERT_EQ(plan.flat_params.size(), 4u);
  EXPECT_THAT(plan.groups[0].flat_params, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(plan.flat_params[0].params, ElementsAre(0, 3));
  EXPECT_THAT(plan.flat_params[1].params, ElementsAre(1));
  EXPECT_FALSE(plan.flat_params[1].requires_grad);
  EXPECT_THAT(plan.flat_params[2].params, ElementsAre(2));
  EXPECT_EQ(plan.flat_params[3].dtype, v1::DTYPE_INT64);
  EXPECT_EQ(plan.groups[0].numel, 13);
  for (size_t p = 0; p < plan.params.size(); ++p) {
    EXPECT_EQ(plan.params[p].index_in_group, static_cast<int>(p));
  }
}

TEST(FlatParam, GroupsNeverShareOne) {
  SpecBuilder b;
  b.Param(0, "w", {3});
  b.Param(b.AddSharded(0, "a"), "w", {3});
  const ShardPlan plan = b.Plan();
  EXPECT_THAT(plan.groups[0].flat_params, ElementsAre(0));
  EXPECT_THAT(plan.groups[1].flat_params, ElementsAre(1));
}

TEST(FlatParam, StartsAreAlignedForTheSmallestStoredDtype) {
  const auto second_offset = [](DType dtype, DType param_dtype) {
    SpecBuilder b;
    b.config().mutable_mixed_precision()->set_param_dtype(param_dtype);
    b.Param(0, "a", {1}, {.dtype = dtype, .requires_grad = false});
    b.Param(0, "b", {1}, {.dtype = dtype, .requires_grad = false});
    return b.Plan().params[1].offset;
  };
  EXPECT_EQ(second_offset(v1::DTYPE_FLOAT32, v1::DTYPE_UNSPECIFIED), 4);
  EXPECT_EQ(second_offset(v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16), 8);
  EXPECT_EQ(second_offset(v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT32), 8);
  EXPECT_EQ(second_offset(v1::DTYPE_FLOAT64, v1::DTYPE_UNSPECIFIED), 2);
  EXPECT_EQ(second_offset(v1::DTYPE_INT8, v1::DTYPE_BFLOAT16), 16);
  EXPECT_EQ(second_offset(v1::DTYPE_INT64, v1::DTYPE_BFLOAT16), 2);
}

TEST(FlatParam, ParamDtypeAppliesToFloatingPointOnly) {
  SpecBuilder b;
  b.config().mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
  b.Param(0, "a", {3});
  b.Param(0, "b", {3}, {.dtype = v1::DTYPE_INT32, .requires_grad = false});
  const ShardPlan plan = b.Plan();
  EXPECT_EQ(plan.flat_params[0].unsharded_dtype, v1::DTYPE_BFLOAT16);
  EXPECT_EQ(plan.flat_params[1].unsharded_dtype, v1::DTYPE_INT32);
}

TEST(Flat, ShardsAreEqualAndMayCutAParameter) {
  SpecBuilder b(3);
  b.Param(0, "a", {5});     // [0, 5), then 3 of inner padding
  b.Param(0, "b", {3, 7});  // [8, 29)
  const ShardPlan plan = b.Plan();
  EXPECT_EQ(plan.flat_params[0].numel, 29);
  EXPECT_EQ(plan.flat_params[0].padded_numel, 36);
  EXPECT_EQ(plan.flat_params[0].shard_numel, 12);
  EXPECT_THAT(ShardOf(plan, 0, 0), ElementsAre(Range{"a", 0, 5}, Range{"b", 0, 4}));
  EXPECT_THAT(ShardOf(plan, 0, 1), ElementsAre(Range{"b", 4, 12}));
  EXPECT_THAT(ShardOf(plan, 0, 2), ElementsAre(Range{"b", 16, 5}));
  EXPECT_EQ(Padding(plan, 0, 0), 3);
  EXPECT_EQ(Padding(plan, 0, 1), 0);
  EXPECT_EQ(Padding(plan, 0, 2), 7);
}

TEST(Flat, NothingIsPaddedWhereNothingNeedsPadding) {
  SpecBuilder b(4);
  b.Param(0, "a", {4, 8});
  b.Param(0, "b", {32});
  const ShardPlan plan = b.Plan();
  EXPECT_EQ(plan.flat_params[0].numel, 64);
  EXPECT_EQ(plan.flat_params[0].padded_numel, 64);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(Padding(plan, 0, rank), 0);
  }
}

TEST(Flat, MoreRanksThanElementsLeavesShardsOfPaddingAlone) {
  SpecBuilder b(8);
  b.Param(0, "scalar", {});
  const ShardPlan plan = b.Plan();
  EXPECT_EQ(plan.flat_params[0].shard_numel, 4);
  EXPECT_THAT(ShardOf(plan, 0, 0), ElementsAre(Range{"scalar", 0, 1}));
  for (int rank = 1; rank < 8; ++rank) {
    EXPECT_THAT(ShardOf(plan, 0, rank), IsEmpty());
    EXPECT_EQ(Padding(plan, 0, rank), 4);
  }
}

TEST(Dim0, RowsAreCutAsTorchChunkCutsThem) {
  SpecBuilder b(4);
  b.config().set_layout(v1::LAYOUT_DIM0);
  b.Param(0, "nine", {9, 2});  // chunks of 3 rows: 3, 3, 3, none
  b.Param(0, "five", {5});     // chunks of 2: 2, 2, 1, none
  b.Param(0, "scalar", {});    // one row
  const ShardPlan plan = b.Plan();
  EXPECT_THAT(ShardOf(plan, 0, 0), ElementsAre(Range{"nine", 0, 6}, Range{"five", 0, 2}, Range{"scalar", 0, 1}));
  EXPECT_THAT(ShardOf(plan, 0, 1), ElementsAre(Range{"nine", 6, 6}, Range{"five", 2, 2}));
  EXPECT_THAT(ShardOf(plan, 0, 2), ElementsAre(Range{"nine", 12, 6}, Range{"five", 4, 1}));
  EXPECT_THAT(ShardOf(plan, 0, 3), IsEmpty());
  EXPECT_EQ(plan.flat_params[0].shard_numel, 9);
  EXPECT_EQ(plan.flat_params[0].padded_numel, plan.flat_params[0].numel);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(Padding(plan, 0, rank), 0);
  }
}

TEST(NoShard, EveryRankOwnsEverythingButWorkIsPartitioned) {
  for (v1::Layout layout : {v1::LAYOUT_FLAT, v1::LAYOUT_DIM0}) {
    SpecBuilder b(3);
    b.config().set_strategy(v1::STRATEGY_NO_SHARD);
    b.config().set_layout(layout);
    b.Param(0, "a", {5});
    b.Param(0, "b", {3, 7});
    const ShardPlan plan = b.Plan();
    EXPECT_EQ(plan.placement.shard_world_size, 1);
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_THAT(ShardOf(plan, 0, rank), ElementsAre(Range{"a", 0, 5}, Range{"b", 0, 21}));
    }
    // 29 elements are 8 units of 4: 2, 3 and 3 of them.
    const std::vector<Segment> first = WorkSegments(plan, 0, 0);
    ASSERT_EQ(first.size(), 1u);
    EXPECT_EQ(first[0].offset + first[0].numel, 5);
    const std::vector<Segment> second = WorkSegments(plan, 0, 1);
    ASSERT_EQ(second.size(), 1u);
    EXPECT_EQ(second[0].offset, 8);
    EXPECT_EQ(second[0].numel, 12);
  }
}

TEST(Sharded, WorkIsWhatARankOwns) {
  SpecBuilder b(3);
  b.Param(0, "b", {3, 7});
  const ShardPlan plan = b.Plan();
  for (int rank = 0; rank < 3; ++rank) {
    const std::vector<Segment> owned = RankSegments(plan, 0, rank);
    const std::vector<Segment> work = WorkSegments(plan, 0, rank);
    ASSERT_EQ(owned.size(), work.size());
    for (size_t i = 0; i < owned.size(); ++i) {
      EXPECT_EQ(owned[i].offset, work[i].offset);
      EXPECT_EQ(owned[i].numel, work[i].numel);
    }
  }
}

TEST(Metadata, RanksAndFlatParametersOutOfRangeAreRefused) {
  SpecBuilder b(2);
  b.Param(0, "w", {3});
  const ShardPlan plan = b.Plan();
  for (const auto& [flat_param, rank] : {std::pair{-1, 0}, {1, 0}, {0, -1}, {0, 2}}) {
    EXPECT_EQ(GetShardMetadata(plan, flat_param, rank).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(RankSegments(plan, flat_param, rank), IsEmpty());
    EXPECT_THAT(WorkSegments(plan, flat_param, rank), IsEmpty());
  }
}

TEST(Lookup, ElementsLeadBackToTheirParameterAndPaddingToNone) {
  SpecBuilder b(2);
  b.Param(0, "a", {5});
  b.Param(0, "b", {3});
  const ShardPlan plan = b.Plan();
  EXPECT_EQ(plan.ParamAt(0, 0), 0);
  EXPECT_EQ(plan.ParamAt(0, 4), 0);
  EXPECT_EQ(plan.ParamAt(0, 5), -1);
  EXPECT_EQ(plan.ParamAt(0, 8), 1);
  EXPECT_EQ(plan.ParamAt(0, 10), 1);
  EXPECT_EQ(plan.ParamAt(0, 11), -1);
  EXPECT_EQ(plan.ParamAt(0, -1), -1);
  EXPECT_EQ(plan.ParamAt(1, 0), -1);
}

}  // namespace
}  // namespace shardd
