#include "server/collective/nodes/node_sum_ops.h"

#include <iterator>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "common/status/status_macros.h"
#include "server/collective/local/local_collective.h"
#include "server/collective/local/reduce_ops.h"

namespace shardd {
namespace {

constexpr int64_t kFp32Bytes = 4;

// A sum over all nodes, and its place in the rank's part.
struct PlacedRun {
  ReduceRun run;
  int64_t offset_bytes = 0;
};

struct RankPart {
  std::vector<PlacedRun> runs;
  int64_t size_bytes = 0;
};

RankPart Place(std::vector<ReduceRun> runs) {
  RankPart part;
  int64_t end_bytes = 0;
  for (ReduceRun& run : runs) {
    // Adjacent runs that only differ in their modes stay adjacent.
    const ReduceRun* const last = part.runs.empty() ? nullptr : &part.runs.back().run;
    const bool touches =
        last != nullptr && last->flat_param == run.flat_param && last->offset + last->numel == run.offset;
    if (!touches) end_bytes = part.size_bytes;
    const int64_t offset_bytes = end_bytes;
    end_bytes += run.numel * kFp32Bytes;
    part.size_bytes = (end_bytes + kSlabAlignmentBytes - 1) / kSlabAlignmentBytes * kSlabAlignmentBytes;
    part.runs.push_back({std::move(run), offset_bytes});
  }
  return part;
}

// Both are in the order of the rank's segments, and each of `local` lies within one of `part`, because `local` is cut
// at least as often.
std::vector<DeviceOp> AddOps(const ReduceScatterRequest& request, const std::vector<ReduceRun>& local,
                             const RankPart& part, char* staging) {
  std::vector<DeviceOp> ops;
  int64_t end_bytes = 0;  // end of what is written
  const auto zero_until = [&](int64_t offset_bytes) {
    if (end_bytes < offset_bytes) ops.emplace_back(ZeroOp{staging + end_bytes, offset_bytes - end_bytes});
  };
  auto at = part.runs.begin();
  for (const ReduceRun& run : local) {
    while (at->run.flat_param != run.flat_param || at->run.offset + at->run.numel <= run.offset) ++at;
    const int64_t offset_bytes = at->offset_bytes + (run.offset - at->run.offset) * kFp32Bytes;
    zero_until(offset_bytes);
    ReduceOp op;
    op.sources = SourcesOf(request, run);
    op.source_dtype = request.plan->flat_params[run.flat_param].unsharded_dtype;
    op.reduce_dtype = v1::DTYPE_FLOAT32;
    op.scale = 1;
    op.accumulate = false;
    op.dst = reinterpret_cast<float*>(staging + offset_bytes);
    op.numel = run.numel;
    ops.emplace_back(std::move(op));
    end_bytes = offset_bytes + run.numel * kFp32Bytes;
  }
  zero_until(part.size_bytes);
  return ops;
}

// A reduction rounds its sources to reduce_dtype before it scales them. This source needs that rounding only once,
// after scaling: through the dtype that the gradient keeps, if that gives the same result, else before it is written.
void AddFinish(const ReduceScatterRequest& all, const ReduceRun& run, size_t rank, char* sum,
               std::vector<DeviceOp>& ops) {
  std::vector<DeviceOp> written;
  AddReduceOps(all, run, rank, {sum}, written);
  ReduceOp& op = std::get<ReduceOp>(written.front());
  op.source_dtype = v1::DTYPE_FLOAT32;
  const DType rounds_to = std::exchange(op.reduce_dtype, v1::DTYPE_FLOAT32);
  if (rounds_to != v1::DTYPE_FLOAT32 && op.keep != rounds_to) {
    if (op.keep == v1::DTYPE_FLOAT32 && !op.accumulate) {
      op.keep = rounds_to;
    } else {
      ReduceOp rounded = op;
      rounded.accumulate = false;
      rounded.keep = rounds_to;
      rounded.dst = reinterpret_cast<float*>(sum);
      rounded.dst_file = -1;
      ops.emplace_back(std::move(rounded));
      op.scale = 1;
    }
  }
  std::move(written.begin(), written.end(), std::back_inserter(ops));
}

}  // namespace

absl::Status CheckNodeSum(const ReduceScatterRequest& request, size_t ranks) {
  SHARDD_RETURN_IF_ERROR(CheckReduceScatter(request, ranks));
  const GroupPlan& group = request.plan->groups[request.group];
  const auto refuse = [&](const auto&... fact) {
    return absl::InvalidArgumentError(absl::StrCat("reduce-scatter group \"", group.name, "\": ", fact...));
  };
  if (!request.nodes.has_value()) return refuse("no sum over nodes is named");
  if (request.nodes->present.size() != group.params.size()) {
    return refuse("presence mask of all nodes has the wrong length (got ", request.nodes->present.size(), ", want ",
                  group.params.size(), ")");
  }
  for (const GradientSource& source : request.sources) {
    for (size_t i = 0; i < group.params.size(); ++i) {
      if (source.present[i] && !request.nodes->present[i]) {
        return refuse("a rank gives what no node does (got parameter \"", request.plan->params[group.params[i]].fqn,
                      "\"; rank=", source.rank, ")");
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<NodeSumOps> MakeNodeSumOps(LocalCollective& local, ReduceScatterRequest& request,
                                          const std::vector<char*>& staging, int64_t slot_bytes) {
  SHARDD_RETURN_IF_ERROR(CheckNodeSum(request, staging.size()));
  // The sum over all nodes is one source, for every rank's part.
  ReduceScatterRequest all;
  all.plan = request.plan;
  all.group = request.group;
  all.sources.push_back({0, staging.front(), request.nodes->present});
  all.modes = request.modes;
  all.gradients = request.gradients;
  all.gradients_file = request.gradients_file;
  all.reduce_dtype = request.reduce_dtype;
  all.scale = request.scale;
  all.keep_low_precision = request.keep_low_precision;
  NodeSumOps ops;
  ops.add.resize(staging.size());
  ops.finish = std::move(request.zeros);
  ops.finish.resize(staging.size());
  const bool is_cut = request.plan->cut_over_nodes;
  std::vector<int64_t> used_bytes(staging.size());
  for (int node = 0; node < NodesOfRow(*request.plan); ++node) {
    SHARDD_ASSIGN_OR_RETURN(const std::vector<std::vector<ReduceRun>> own, local.RunsByRank(request, node));
    SHARDD_ASSIGN_OR_RETURN(std::vector<std::vector<ReduceRun>> sums, local.RunsByRank(all, node));
    for (size_t rank = 0; rank < staging.size(); ++rank) {
      const RankPart part = Place(std::move(sums[rank]));
      char* const at = staging[rank] + used_bytes[rank];
      used_bytes[rank] += part.size_bytes;
      if (used_bytes[rank] > slot_bytes) {
        return absl::InvalidArgumentError(
            absl::StrCat("reduce-scatter group \"", request.plan->groups[request.group].name,
                         "\": a rank's part does not fit into its staging (got ", used_bytes[rank],
                         " bytes, want <= ", slot_bytes, "; rank=", rank, ")"));
      }
      if (part.runs.empty()) continue;
      std::vector<DeviceOp> adds = AddOps(request, own[rank], part, at);
      std::move(adds.begin(), adds.end(), std::back_inserter(ops.add[rank]));
      ops.parts.push_back(
          {static_cast<int>(rank), reinterpret_cast<float*>(at), part.size_bytes / kFp32Bytes, is_cut ? node : -1});
      if (is_cut && node != request.plan->node) continue;  // the other node writes it
      for (const PlacedRun& placed : part.runs) {
        AddFinish(all, placed.run, rank, at + placed.offset_bytes, ops.finish[rank]);
      }
    }
  }
  return ops;
}

}  // namespace shardd
