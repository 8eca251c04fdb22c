// What must hold of every placement, over random trees, splits of the world and placements.

#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "tests/common/plan/property_fixture.h"

namespace shardd {
namespace {

TEST_F(Property, PlacementsCoverEveryElementOncePerHolderAndNoPadding) {
  ForAll([](const v1::JobSpec&, const ShardPlan& plan) {
    for (Purpose purpose : {Purpose::kParameters, Purpose::kGradients, Purpose::kOptimizer}) {
      const int holders = plan.world_size / plan.placement.pieces(purpose);
      const auto owned = [purpose](const ShardPlan& of, int f, int rank) {
        return OwnedSegments(of, purpose, f, rank);
      };
      for (size_t f = 0; f < plan.flat_params.size(); ++f) {
        ASSERT_EQ(Claims(plan, f, owned), ExpectedClaims(plan, f, holders));
      }
    }
  });
}

TEST_F(Property, EveryElementHasOneWriterPerCopy) {
  int with_copies = 0, with_copies_of_states = 0;
  ForAll([&](const v1::JobSpec&, const ShardPlan& plan) {
    with_copies += plan.shard_copies > 1 ? 1 : 0;
    with_copies_of_states += plan.memory.optimizer_bytes > 0 && plan.optimizer_copies > 1 ? 1 : 0;
    for (int copy = 0; copy < plan.shard_copies; ++copy) {
      const auto written = [copy](const ShardPlan& of, int f, int rank) {
        const bool here = of.shard_copies == 1 || of.placement.replica_index[rank] == copy;
        return here ? WriteSegments(of, f, rank) : std::vector<Segment>();
      };
      for (size_t f = 0; f < plan.flat_params.size(); ++f) {
        ASSERT_EQ(Claims(plan, f, written), ExpectedClaims(plan, f, 1)) << "copy " << copy;
      }
    }
  });
  EXPECT_GT(with_copies, 0);
  EXPECT_GT(with_copies_of_states, 0);
}

TEST_F(Property, EveryGradientHasOneWriterPerCopyWhoHoldsIt) {
  ForAll([](const v1::JobSpec&, const ShardPlan& plan) {
    for (size_t p = 0; p < plan.params.size(); ++p) {
      std::vector<std::vector<int>> claims(plan.gradient_copies, std::vector<int>(plan.params[p].numel, 0));
      for (int rank = 0; rank < plan.world_size; ++rank) {
        const ParamRange write = GradientWriteRange(plan, static_cast<int>(p), rank);
        const ParamRange own = OwnedRange(plan, Purpose::kGradients, static_cast<int>(p), rank);
        ASSERT_TRUE(write.numel == 0 || (write.first == own.first && write.numel == own.numel));
        const int copy = plan.gradient_copies > 1 ? plan.placement.replica_index[rank] : 0;
        for (int64_t i = write.first; i < write.first + write.numel; ++i) ++claims[copy][i];
      }
      for (const std::vector<int>& copy : claims) {
        ASSERT_EQ(copy, std::vector<int>(plan.params[p].numel, 1)) << plan.params[p].fqn;
      }
    }
  });
}

TEST_F(Property, NoGroupIsCutFinerAfterForwardThanItsShards) {
  int cut_less = 0;
  ForAll([&](const v1::JobSpec&, const ShardPlan& plan) {
    const int pieces = plan.placement.pieces(Purpose::kParameters);
    for (const GroupPlan& group : plan.groups) {
      ASSERT_GE(group.post_forward_shard_size, 1);
      ASSERT_LE(group.post_forward_shard_size, pieces);
      ASSERT_TRUE(group.reshard_after_forward || group.post_forward_shard_size == 1);
      cut_less += group.reshard_after_forward && group.post_forward_shard_size < pieces ? 1 : 0;
    }
  });
  EXPECT_GT(cut_less, 0);
}

TEST_F(Property, WorkIsAPartitionInEveryStrategyAndAligned) {
  ForAll([](const v1::JobSpec&, const ShardPlan& plan) {
    for (size_t f = 0; f < plan.flat_params.size(); ++f) {
      ASSERT_EQ(Claims(plan, f, WorkSegments), ExpectedClaims(plan, f, 1));
      const FlatParamPlan& flat = plan.flat_params[f];
      if (plan.config.layout() == v1::LAYOUT_DIM0 && plan.placement.shard_world_size > 1) {
        continue;  // rows start where they start
      }
      for (int rank = 0; rank < plan.world_size; ++rank) {
        for (const Segment& segment : WorkSegments(plan, f, rank)) {
          ASSERT_EQ(segment.offset * DTypeSizeBytes(flat.dtype) % kParamAlignmentBytes, 0);
          ASSERT_EQ(segment.offset * DTypeSizeBytes(flat.unsharded_dtype) % kParamAlignmentBytes, 0);
        }
      }
    }
  });
}

TEST_F(Property, AFinerPieceLiesInTheSameRanksCoarserOne) {
  ForAll([](const v1::JobSpec&, const ShardPlan& plan) {
    for (size_t p = 0; p < plan.params.size(); ++p) {
      for (int rank = 0; rank < plan.world_size; ++rank) {
        ParamRange outer = {0, plan.params[p].numel};
        for (Purpose purpose : {Purpose::kParameters, Purpose::kGradients, Purpose::kOptimizer}) {
          const ParamRange inner = OwnedRange(plan, purpose, static_cast<int>(p), rank);
          if (inner.numel > 0) {
            ASSERT_GE(inner.first, outer.first);
            ASSERT_LE(inner.first + inner.numel, outer.first + outer.numel);
          }
          outer = inner;
        }
      }
    }
  });
}

TEST_F(Property, ARangeOfAParameterIsItsSegment) {
  ForAll([](const v1::JobSpec&, const ShardPlan& plan) {
    for (Purpose purpose : {Purpose::kParameters, Purpose::kGradients, Purpose::kOptimizer}) {
      for (int rank = 0; rank < plan.world_size; ++rank) {
        std::map<int, Segment> owned;
        for (size_t f = 0; f < plan.flat_params.size(); ++f) {
          for (const Segment& segment : OwnedSegments(plan, purpose, static_cast<int>(f), rank)) {
            ASSERT_TRUE(owned.emplace(segment.param, segment).second) << "a parameter's piece is one range";
          }
        }
        for (size_t p = 0; p < plan.params.size(); ++p) {
          const ParamRange range = OwnedRange(plan, purpose, static_cast<int>(p), rank);
          const auto found = owned.find(static_cast<int>(p));
          ASSERT_EQ(range.numel, found == owned.end() ? 0 : found->second.numel);
          if (range.numel > 0) {
            ASSERT_EQ(range.first, found->second.offset - plan.params[p].offset);
          }
        }
      }
    }
  });
}

TEST_F(Property, ReplicasHoldTheSameAndShardGroupsHoldAll) {
  ForAll([](const v1::JobSpec&, const ShardPlan& plan) {
    const Placement& placement = plan.placement;
    ASSERT_EQ(placement.replicas * placement.shard_world_size, plan.world_size);
    std::set<std::pair<int, int>> places;
    for (int rank = 0; rank < plan.world_size; ++rank) {
      ASSERT_LT(placement.replica_index[rank], placement.replicas);
      ASSERT_LT(placement.shard_index[rank], placement.shard_world_size);
      ASSERT_TRUE(places.emplace(placement.replica_index[rank], placement.shard_index[rank]).second);
    }
    if (placement.pieces(Purpose::kParameters) != placement.shard_world_size) {
      return;
    }
    std::map<int, std::vector<std::pair<int64_t, int64_t>>> by_shard;
    for (int rank = 0; rank < plan.world_size; ++rank) {
      std::vector<std::pair<int64_t, int64_t>> ranges;
      for (size_t f = 0; f < plan.flat_params.size(); ++f) {
        for (const Segment& segment : RankSegments(plan, static_cast<int>(f), rank)) {
          ranges.emplace_back(segment.offset, segment.numel);
        }
      }
      const auto [found, added] = by_shard.emplace(placement.shard_index[rank], ranges);
      ASSERT_EQ(found->second, ranges) << "rank " << rank;
    }
  });
}

// Memory of one rank is the same sum that ranks' segments give, and what is stored on the node follows from copies.
TEST_F(Property, PredictedMemoryFollowsFromThePlacement) {
  ForAll([](const v1::JobSpec&, const ShardPlan& plan) {
    const PlacedMemory placed = PredictPlacedMemory(plan);
    int64_t stored = 0, trained = 0;
    for (const ParamPlan& param : plan.params) {
      stored += param.numel * DTypeSizeBytes(param.dtype);
      trained += param.requires_grad ? param.numel : 0;
    }
    const auto expect = [&](Purpose purpose, int64_t bytes, int64_t whole) {
      const int pieces = plan.placement.pieces(purpose);
      ASSERT_GE(bytes * pieces, whole) << "the largest of equal or uneven pieces";
      ASSERT_LE(bytes, whole);
      if (pieces == 1) {
        ASSERT_EQ(bytes, whole);
      }
    };
    expect(Purpose::kParameters, placed.parameters_bytes, stored);
    expect(Purpose::kGradients, placed.gradients_bytes, 4 * trained);
    expect(Purpose::kOptimizer, placed.optimizer_bytes, 4 * trained * plan.optimizer_states);
    ASSERT_EQ(plan.memory.shards_bytes, plan.shard_copies * plan.shards_stride_bytes);
    ASSERT_EQ(plan.memory.optimizer_bytes, plan.optimizer_copies * plan.optimizer_stride_bytes);
    ASSERT_EQ(plan.memory.gradients_bytes, plan.gradient_copies * plan.gradients_stride_bytes);
    ASSERT_EQ(plan.shards_stride_bytes % kSlabAlignmentBytes, 0);
    ASSERT_EQ(plan.gradients_stride_bytes % kSlabAlignmentBytes, 0);
  });
}

// torch.chunk(tensor, chunks, dim=0), by its documentation: chunks of ceil(rows / chunks) rows until none are left.
std::vector<std::vector<int64_t>> Chunked(const std::vector<int64_t>& rows, int chunks) {
  std::vector<std::vector<int64_t>> result(chunks);
  const size_t chunk_rows = (rows.size() + chunks - 1) / chunks;
  for (size_t i = 0; i < rows.size(); ++i) {
    result[i / chunk_rows].push_back(rows[i]);
  }
  return result;
}

TEST_F(Property, Dim0PiecesAreChunkedRowsAndChunkedAgainOverReplicas) {
  ForAll([](const v1::JobSpec&, const ShardPlan& plan) {
    if (plan.config.layout() != v1::LAYOUT_DIM0) {
      return;
    }
    for (size_t f = 0; f < plan.flat_params.size(); ++f) {
      ASSERT_EQ(plan.flat_params[f].padded_numel, plan.flat_params[f].numel);
    }
    const Placement& placement = plan.placement;
    for (Purpose purpose : {Purpose::kParameters, Purpose::kGradients, Purpose::kOptimizer}) {
      for (size_t p = 0; p < plan.params.size(); ++p) {
        const ParamPlan& param = plan.params[p];
        std::vector<int64_t> all(param.shape.empty() ? 1 : param.shape[0]);
        std::iota(all.begin(), all.end(), 0);
        const int64_t row_numel = param.numel / static_cast<int64_t>(all.size());
        for (int rank = 0; rank < plan.world_size; ++rank) {
          std::vector<int64_t> want = all;
          if (placement.pieces(purpose) > 1) {
            want = Chunked(want, placement.shard_world_size)[placement.shard_index[rank]];
          }
          if (placement.pieces(purpose) > placement.shard_world_size) {
            want = Chunked(want, placement.replicas)[placement.replica_index[rank]];
          }
          const ParamRange got = OwnedRange(plan, purpose, static_cast<int>(p), rank);
          ASSERT_EQ(got.numel, static_cast<int64_t>(want.size()) * row_numel) << param.fqn;
          if (!want.empty()) {
            ASSERT_EQ(got.first, want.front() * row_numel) << param.fqn;
          }
        }
      }
    }
  });
}

TEST_F(Property, TheLargestShardIsTheLargest) {
  ForAll([](const v1::JobSpec&, const ShardPlan& plan) {
    for (size_t f = 0; f < plan.flat_params.size(); ++f) {
      int64_t largest = 0;
      for (int rank = 0; rank < plan.world_size; ++rank) {
        const absl::StatusOr<ShardMetadata> metadata = GetShardMetadata(plan, f, rank);
        int64_t numel = metadata->padding_numel;
        for (const ShardMetadata::Piece& piece : metadata->pieces) {
          numel += piece.numel;
        }
        largest = std::max(largest, numel);
      }
      ASSERT_EQ(plan.flat_params[f].shard_numel, largest);
    }
  });
}

}  // namespace
}  // namespace shardd
