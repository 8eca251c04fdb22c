#ifndef SHARDD_COMMON_PLAN_PLACEMENT_H_
#define SHARDD_COMMON_PLAN_PLACEMENT_H_

// Where parameters, gradients and optimizer state are sharded, replicated or both. A strategy is one row of the table
// below and nothing else; JobConfig.placement overrides the placement of each kind of state. Everything that depends on
// a strategy (who owns which element, who works on it, who writes it, when a group is resharded, what a rank holds) is
// derived from the resulting Placement.
//
// The world of W ranks is split into R shard groups of S ranks (R * S = W; only hybrid strategies have R > 1 and 1 < S
// < W). A rank has a replica index r (its group) and a shard index s (its position in the group). One copy of something
// is cut into 1, S or W pieces; cut into W, each of the S shards is cut once more into R.
//
// If ranks share memory, as on a CPU node, R replicas hold equal bytes and are stored once; ShardPlan's copies are the
// exceptions. A backend whose ranks have their own memory holds what PlacedMemory predicts, reduce-scatters gradients
// within shard groups in each backward, and all-reduces them between replicas in the last one. Summed in rank order in
// fp32, both give the mean over all W ranks.

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
  Groups groups;  // the members of a shard group
  v1::Spread parameters;
  v1::Spread gradients;
  v1::Spread optimizer;
  bool reshard_after_forward;  // default; the root is not resharded
};

// One row per strategy.
absl::Span<const StrategyRow> StrategyTable();
// The row of a strategy. REQUIRES: the table has it.
const StrategyRow& RowOf(v1::Strategy strategy);

// Plain data, part of a ShardPlan.
struct Placement {
  int shard_world_size = 1;                        // S
  int replicas = 1;                                // R
  std::vector<int> shard_index;                    // by rank
  std::vector<int> replica_index;                  // by rank
  std::array<int, kPurposeCount> cut = {1, 1, 1};  // by purpose, the number of pieces: 1, S or W
  bool reshard_after_forward = true;               // default; the root is not resharded

  int pieces(Purpose purpose) const { return cut[static_cast<size_t>(purpose)]; }
  // Which of pieces(purpose) the rank holds. The pieces of a shard are adjacent: shard s is pieces [s * R, s * R + R)
  // of W.
  int PieceOf(Purpose purpose, int rank) const;
  // True for the first of the ranks that hold the same piece: replica 0 of its shard group.
  bool IsFirstHolder(Purpose purpose, int rank) const;
};

// REQUIRES: `config` is filled (FillConfig).
Placement MakePlacement(const v1::JobConfig& config, int world_size);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_PLACEMENT_H_
