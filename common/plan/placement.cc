#include "common/plan/placement.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/plan/placement_internal.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

using Groups = StrategyRow::Groups;

constexpr StrategyRow kTable[] = {
    // ZeRO stage 3.
    {v1::STRATEGY_FULL_SHARD, Groups::kWorld, v1::SPREAD_SHARD_GROUP, v1::SPREAD_SHARD_GROUP, v1::SPREAD_SHARD_GROUP,
     true},
    // The same cut, but unsharded from forward to backward: the communication of ZeRO stage 2.
    {v1::STRATEGY_SHARD_GRAD_OP, Groups::kWorld, v1::SPREAD_SHARD_GROUP, v1::SPREAD_SHARD_GROUP, v1::SPREAD_SHARD_GROUP,
     false},
    // Data parallelism, and the base of ZeRO stages 1 and 2, which cut less than parameters.
    {v1::STRATEGY_NO_SHARD, Groups::kOneRank, v1::SPREAD_REPLICATED, v1::SPREAD_REPLICATED, v1::SPREAD_REPLICATED,
     false},
    // The first two, within each shard group.
    {v1::STRATEGY_HYBRID_SHARD, Groups::kGiven, v1::SPREAD_SHARD_GROUP, v1::SPREAD_SHARD_GROUP, v1::SPREAD_SHARD_GROUP,
     true},
    {v1::STRATEGY_HYBRID_SHARD_ZERO2, Groups::kGiven, v1::SPREAD_SHARD_GROUP, v1::SPREAD_SHARD_GROUP,
     v1::SPREAD_SHARD_GROUP, false},
};

template <typename... Text>
absl::Status ConfigError(absl::string_view field, const Text&... text) {
  return absl::InvalidArgumentError(absl::StrCat("plan config ", field, ": ", text...));
}

std::string GroupText(const v1::ShardGroup& group) {
  return absl::StrCat("[", absl::StrJoin(group.ranks(), ", "), "]");
}

std::string ShortGroupText(const v1::ShardGroup& group) { return plan_internal::Shortened(GroupText(group)); }

absl::Status CheckShardGroups(const v1::JobConfig& config, int world_size) {
  const int size = config.shard_groups(0).ranks_size();
  std::vector<int> group_of(static_cast<size_t>(world_size), -1);
  for (int g = 0; g < config.shard_groups_size(); ++g) {
    const v1::ShardGroup& group = config.shard_groups(g);
    if (group.ranks_size() != size || size == 0) {
      return ConfigError("shard_groups", "group ", g, " ", ShortGroupText(group), " has another size than group 0 ",
                         ShortGroupText(config.shard_groups(0)), " (got ", group.ranks_size(), ", want ",
                         std::max(size, 1), ")");
    }
    for (const int rank : group.ranks()) {
      if (rank < 0 || rank >= world_size) {
        return ConfigError("shard_groups", "group ", g, " ", ShortGroupText(group),
                           " has a rank that the job has not (got ", rank, ", want 0 <= rank < ", world_size, ")");
      }
      int& holder = group_of[static_cast<size_t>(rank)];
      if (holder >= 0) {
        return ConfigError("shard_groups", "rank ", rank, " is in two places (group ", holder, " ",
                           ShortGroupText(config.shard_groups(holder)), " and group ", g, " ", ShortGroupText(group),
                           ")");
      }
      holder = g;
    }
  }
  const auto missing = std::find(group_of.begin(), group_of.end(), -1);
  if (missing != group_of.end()) {
    return ConfigError("shard_groups", "rank ", missing - group_of.begin(), " is in no group (got ",
                       plan_internal::Shortened(plan_internal::ShardGroupsText(config)), ", want all of 0 to ",
                       world_size - 1, ")");
  }
  if (config.shard_group_size() != 0 && config.shard_group_size() != size) {
    return ConfigError("shard_group_size", "differs from the size of the shard_groups (got ", config.shard_group_size(),
                       ", want ", size, ")");
  }
  return absl::OkStatus();
}

// Shard groups that span nodes: rows of neighbouring whole nodes.
absl::Status CheckRowsOfNodes(const v1::JobConfig& config, int world_size) {
  const int size = config.shard_group_size();
  const int nodes = config.nodes().addresses_size();
  if (size % world_size != 0) {
    return ConfigError("shard_group_size", "spans nodes and does not end with one (got ", size,
                       " ranks, want a multiple or a divisor of the ", world_size, " ranks of a node)");
  }
  const int row = size / world_size;
  if (row == nodes) {
    return ConfigError("shard_group_size", "is all ranks of all nodes (got ", size, " ranks on ", nodes, " nodes, ",
                       "want fewer); use ",
                       v1::Strategy_Name(RowOf(config.strategy()).reshard_after_forward ? v1::STRATEGY_FULL_SHARD
                                                                                        : v1::STRATEGY_SHARD_GRAD_OP),
                       ", which cuts one copy over them");
  }
  if (nodes % row != 0) {
    return ConfigError("shard_group_size", "does not divide the nodes into rows (got ", size, " ranks, those of ", row,
                       " nodes, and ", nodes, " nodes, want a divisor of these)");
  }
  if (config.replica_copies()) {
    return ConfigError("replica_copies", "each node holds its part once where shard groups span nodes (got true with ",
                       "shard_group_size ", size, " and ", world_size, " ranks of a node, want false)");
  }
  return absl::OkStatus();
}

absl::Status FillGroups(v1::JobConfig& config, int world_size) {
  if (RowOf(config.strategy()).groups != Groups::kGiven) {
    if (config.shard_groups_size() > 0 || config.shard_group_size() != 0) {
      return ConfigError(config.shard_groups_size() > 0 ? "shard_groups" : "shard_group_size",
                         "only hybrid strategies have shard groups (got ", v1::Strategy_Name(config.strategy()),
                         "); use STRATEGY_HYBRID_SHARD or STRATEGY_HYBRID_SHARD_ZERO2");
    }
    return absl::OkStatus();
  }
  if (config.shard_groups_size() > 0) {
    SHARDD_RETURN_IF_ERROR(CheckShardGroups(config, world_size));
    config.set_shard_group_size(config.shard_groups(0).ranks_size());
    return absl::OkStatus();
  }
  const int size = config.shard_group_size() == 0 ? world_size : config.shard_group_size();
  if (size > world_size && config.nodes().addresses_size() > 1) {
    return CheckRowsOfNodes(config, world_size);
  }
  if (size < 1 || world_size % size != 0) {
    return ConfigError("shard_group_size", "is no divisor of the world size (got ", size, ", world size ", world_size,
                       ")");
  }
  config.set_shard_group_size(size);
  for (int first = 0; first < world_size; first += size) {
    v1::ShardGroup* group = config.add_shard_groups();
    for (int rank = first; rank < first + size; ++rank) group->add_ranks(rank);
  }
  return absl::OkStatus();
}

// The order of the values is also the order of fineness.
absl::Status CheckSpread(absl::string_view field, v1::Spread spread, v1::Spread coarsest, absl::string_view before) {
  if (!v1::Spread_IsValid(spread)) {
    return ConfigError(field, "unknown value (got ", static_cast<int>(spread), ")");
  }
  if (spread < coarsest) {
    return ConfigError(field, "is cut more coarsely than ", before, " (got ", v1::Spread_Name(spread), ", want ",
                       v1::Spread_Name(coarsest), " or finer)");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Span<const StrategyRow> StrategyTable() { return kTable; }

const StrategyRow& RowOf(v1::Strategy strategy) {
  return *std::find_if(std::begin(kTable), std::end(kTable),
                       [strategy](const StrategyRow& row) { return row.strategy == strategy; });
}

int Placement::PieceOf(Purpose purpose, int rank) const {
  const auto index = static_cast<size_t>(rank);
  if (pieces(purpose) == 1) return 0;
  if (pieces(purpose) == shard_world_size) return shard_index[index];
  return shard_index[index] * replicas + replica_index[index];
}

bool Placement::IsFirstHolder(Purpose purpose, int rank) const {
  const auto index = static_cast<size_t>(rank);
  if (pieces(purpose) == shard_world_size * replicas) return true;
  return replica_index[index] == 0 && (pieces(purpose) > 1 || shard_index[index] == 0);
}

Placement MakePlacement(const v1::JobConfig& config, int world_size) {
  const StrategyRow& row = RowOf(config.strategy());
  Placement placement;
  placement.shard_index.resize(static_cast<size_t>(world_size));
  placement.replica_index.resize(static_cast<size_t>(world_size));
  const auto place = [&placement](int rank, int replica, int shard) {
    placement.replica_index[static_cast<size_t>(rank)] = replica;
    placement.shard_index[static_cast<size_t>(rank)] = shard;
  };
  // Shard groups that span nodes are not listed: the world is the ranks of one then, as everywhere below.
  const bool is_whole = row.groups == Groups::kWorld || (row.groups == Groups::kGiven && config.shard_groups().empty());
  if (!is_whole && row.groups == Groups::kGiven) {
    placement.shard_world_size = config.shard_group_size();
    for (int g = 0; g < config.shard_groups_size(); ++g) {
      for (int s = 0; s < placement.shard_world_size; ++s) place(config.shard_groups(g).ranks(s), g, s);
    }
  } else {
    placement.shard_world_size = is_whole ? world_size : 1;
    for (int rank = 0; rank < world_size; ++rank) {
      is_whole ? place(rank, 0, rank) : place(rank, rank, 0);
    }
  }
  placement.replicas = world_size / placement.shard_world_size;
  const v1::Spread spreads[] = {config.placement().parameters(), config.placement().gradients(),
                                config.placement().optimizer()};
  for (size_t i = 0; i < kPurposeCount; ++i) {
    placement.cut[i] = spreads[i] == v1::SPREAD_REPLICATED    ? 1
                       : spreads[i] == v1::SPREAD_SHARD_GROUP ? placement.shard_world_size
                                                              : world_size;
  }
  placement.reshard_after_forward = row.reshard_after_forward && spreads[0] != v1::SPREAD_REPLICATED;
  return placement;
}

namespace plan_internal {

absl::Status CheckShardGroupCount(const v1::JobConfig& config, int world_size) {
  if (config.shard_groups_size() > world_size) {
    return ConfigError("shard_groups", "more groups than the job has ranks (got ", config.shard_groups_size(),
                       ", want at most ", world_size, ")");
  }
  int64_t ranks = 0;
  for (const v1::ShardGroup& group : config.shard_groups()) ranks += group.ranks_size();
  if (ranks > world_size) {
    return ConfigError("shard_groups", "more ranks are listed than the job has (got ", ranks, ", want ", world_size,
                       ")");
  }
  return absl::OkStatus();
}

absl::Status FillPlacement(v1::JobConfig& config, int world_size) {
  SHARDD_RETURN_IF_ERROR(FillGroups(config, world_size));
  const StrategyRow& row = RowOf(config.strategy());
  if (config.replica_copies() && row.groups != Groups::kGiven) {
    return ConfigError("replica_copies", "only hybrid strategies have replicas (got true with ",
                       v1::Strategy_Name(config.strategy()), ", want false)");
  }
  v1::Placement& placement = *config.mutable_placement();
  if (placement.parameters() == v1::SPREAD_UNSPECIFIED) placement.set_parameters(row.parameters);
  if (placement.gradients() == v1::SPREAD_UNSPECIFIED) {
    placement.set_gradients(std::max(row.gradients, placement.parameters()));
  }
  if (placement.optimizer() == v1::SPREAD_UNSPECIFIED) {
    placement.set_optimizer(std::max(row.optimizer, placement.gradients()));
  }
  SHARDD_RETURN_IF_ERROR(CheckSpread("placement.parameters", placement.parameters(), v1::SPREAD_REPLICATED, "nothing"));
  SHARDD_RETURN_IF_ERROR(
      CheckSpread("placement.gradients", placement.gradients(), placement.parameters(), "placement.parameters"));
  return CheckSpread("placement.optimizer", placement.optimizer(), placement.gradients(), "placement.gradients");
}

std::string ShardGroupsText(const v1::JobConfig& config) {
  return absl::StrCat(
      "[",
      absl::StrJoin(config.shard_groups(), ", ",
                    [](std::string* out, const v1::ShardGroup& group) { absl::StrAppend(out, GroupText(group)); }),
      "]");
}

std::string Shortened(absl::string_view text) {
  constexpr size_t kMostBytes = 1024;
  constexpr size_t kRoomForTheCount = 48;
  if (text.size() <= kMostBytes) return std::string(text);
  const size_t kept = kMostBytes - kRoomForTheCount;
  return absl::StrCat(text.substr(0, kept), " ... and ", text.size() - kept, " more bytes");
}

}  // namespace plan_internal
}  // namespace shardd
