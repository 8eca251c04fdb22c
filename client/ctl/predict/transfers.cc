#include "client/ctl/predict/transfers.h"

#include "common/plan/node_part.h"
#include "common/plan/whole_params.h"
#include "common/tensor/dtype.h"
#include "common/tensor/float8_blocks.h"

namespace shardd::ctl {
namespace {

constexpr double kFp32Bytes = 4;

double Part(int of) { return of <= 1 ? 0 : static_cast<double>(of - 1) / of; }

const FlatParamPlan& FlatOf(const ShardPlan& plan, int flat) { return plan.flat_params[static_cast<size_t>(flat)]; }
const GroupPlan& GroupOf(const ShardPlan& plan, int group) { return plan.groups[static_cast<size_t>(group)]; }

// Nodes over which one copy is cut: a larger fleet has more rows, or one longer row.
int Row(const ShardPlan& plan, const Fleet& fleet) {
  if (!plan.cut_over_nodes) return 1;
  return HasRows(plan) ? NodesOfRow(plan) : fleet.nodes;
}

// Ranks over which one copy is cut, of all nodes.
double Owners(const ShardPlan& plan, const Fleet& fleet, Purpose purpose) {
  return plan.cut_over_nodes ? static_cast<double>(fleet.ranks) * Row(plan, fleet)
                             : static_cast<double>(plan.placement.pieces(purpose));
}

}  // namespace

Traffic GatherTraffic(const ShardPlan& plan, const Fleet& fleet, int group) {
  Traffic traffic;
  if (plan.pools.empty()) return traffic;
  double stored_bytes = 0;
  double image_bytes = 0;
  double travelling_bytes = 0;  // of all nodes
  for (const int f : GroupOf(plan, group).flat_params) {
    travelling_bytes += IsFloat8(plan, f) ? static_cast<double>(Float8BlocksBytes(FlatOf(plan, f).numel))
                                          : static_cast<double>(FlatOf(plan, f).numel) *
                                                DTypeSizeBytes(FlatOf(plan, f).unsharded_dtype);
    stored_bytes += static_cast<double>(FlatOf(plan, f).numel) * DTypeSizeBytes(FlatOf(plan, f).dtype);
    image_bytes += static_cast<double>(FlatOf(plan, f).numel) * DTypeSizeBytes(FlatOf(plan, f).unsharded_dtype);
  }
  const double elsewhere = Part(Row(plan, fleet));
  if (fleet.gpus) {
    traffic.node_link_bytes = image_bytes / fleet.ranks * elsewhere;
    traffic.device_link_bytes = image_bytes * Part(fleet.ranks);
    traffic.memory_bytes = (stored_bytes * (1 - elsewhere) + image_bytes) / fleet.ranks;
  } else {  // one copy for all ranks of the node, which share the link
    traffic.node_link_bytes = travelling_bytes * elsewhere / fleet.ranks;
    traffic.memory_bytes = (stored_bytes * (1 - elsewhere) + image_bytes) / fleet.ranks;
  }
  return traffic;
}

Traffic ReductionTraffic(const ShardPlan& plan, const Fleet& fleet, int group) {
  Traffic traffic;
  double written_bytes = 0;
  double sum_bytes = 0;
  for (const int f : GroupOf(plan, group).flat_params) {
    if (!FlatOf(plan, f).requires_grad) continue;
    written_bytes += static_cast<double>(FlatOf(plan, f).numel) * DTypeSizeBytes(FlatOf(plan, f).unsharded_dtype);
    sum_bytes += static_cast<double>(FlatOf(plan, f).numel) * kFp32Bytes;
  }
  if (fleet.gpus) traffic.device_link_bytes = written_bytes * Part(fleet.ranks);
  // Each node sends all but what it adds, and what it has added to the other nodes that hold it.
  const double rows = static_cast<double>(fleet.nodes) / Row(plan, fleet);
  traffic.node_link_bytes = sum_bytes / fleet.ranks * (Part(fleet.nodes) + (rows - 1) / fleet.nodes);
  // Each rank adds its part of what all of the node have written, and what other nodes send.
  traffic.memory_bytes = written_bytes + sum_bytes / fleet.ranks * (fleet.nodes > 1 ? 2 : 1);
  return traffic;
}

double UpdateBytes(const ShardPlan& plan, const Fleet& fleet) {
  double bytes = 0;
  for (const FlatParamPlan& flat : plan.flat_params) {
    if (!flat.requires_grad) continue;
    const double parameters = 2.0 * DTypeSizeBytes(flat.dtype);
    const double copy = flat.params_offset_bytes >= 0 ? DTypeSizeBytes(flat.unsharded_dtype) : 0;
    double states = 0;  // elements; Adafactor's are a few rows and columns
    for (const int param : flat.params) {
      for (int k = 0; k < flat.optimizer_states; ++k) states += static_cast<double>(StateNumel(plan, param, k));
    }
    bytes += static_cast<double>(flat.numel) * (kFp32Bytes + parameters + copy) + 2 * kFp32Bytes * states;
  }
  return bytes / Owners(plan, fleet, Purpose::kOptimizer);
}

}  // namespace shardd::ctl
