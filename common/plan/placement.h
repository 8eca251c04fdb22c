#ifndef SHARDD_COMMON_PLAN_PLACEMENT_H_
#define SHARDD_COMMON_PLAN_PLACEMENT_H_

// Where parameters, gradients and optimizer state are sharded, replicated or both. A strategy is one row of the table
// below and nothing else; JobConfig.placement may place each kind of state otherwise. Everything that depends on a
// strategy (who owns which element, who works on it, who writes it, when a group is resharded, what a rank holds) is
// derived from the Placement that comes of it.
//
// The world of W ranks is split into R shard groups of S ranks (R * S = W; hybrid strategies alone have R > 1 and
// 1 < S < W). A rank is (replica index r: which group, shard index s: its place in it). One copy of something is cut
// into 1, S or W pieces; cut into W, each of the S shards is cut once more into R.
//
// Where memory is shared, as between the ranks of a CPU node, R replicas hold equal bytes and are stored once:
// ShardPlan's copies say where that would not do. A backend whose ranks have memory of their own keeps what
// PlacedMemory predicts, reduce-scatters gradients within shard groups in each backward and all-reduces them between
// replicas in the last; summed in rank order in fp32, both give the mean over all W ranks.

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "shardd/v1/model.pb.h"

namespace shardd {

enum class Purpose { kParameters = 0, kGradients, kOptimizer };
inline constexpr int kPurposeCount = 3;

struct StrategyRow {
  enum class Groups { kOneRank, kGiven, kWorld };
  v1::Strategy strategy;
  Groups groups;  // what a shard group is
  v1::Spread parameters;
  v1::Spread gradients;
  v1::Spread optimizer;
  bool reshard_after_forward;  // where nothing else is said; the root is not
};

// One row per strategy.
absl::Span<const StrategyRow> StrategyTable();
// REQUIRES: a strategy of the table.
const StrategyRow& RowOf(v1::Strategy strategy);

// Plain data, part of a ShardPlan.
struct Placement {
  int shard_world_size = 1;                        // S
  int replicas = 1;                                // R
  std::vector<int> shard_index;                    // by rank
  std::vector<int> replica_index;                  // by rank
  std::array<int, kPurposeCount> cut = {1, 1, 1};  // by purpose, into so many pieces: 1, S or W
  bool reshard_after_forward = true;               // where nothing else is said; the root is not

  int pieces(Purpose purpose) const { return cut[static_cast<size_t>(purpose)]; }
  // Which of pieces(purpose) the rank holds. Pieces of a shard follow each other, so shard s is pieces [s * R, s * R +
  // R) of W.
  int PieceOf(Purpose purpose, int rank) const;
  // Where several ranks hold the same piece, the first of them: replica 0 of its shard group.
  bool IsFirstHolder(Purpose purpose, int rank) const;
};

// REQUIRES: `config` is filled (FillConfig).
Placement MakePlacement(const v1::JobConfig& config, int world_size);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_PLACEMENT_H_
