#include "server/multinode/reduced_steps.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

using Reduced = v1::PeerMessage::Reduced;

// Nodes may take a norm in pieces of other sizes: one for each of their devices.
bool SameWithinRounding(double a, double b) {
  constexpr double kRounding = 1e-9;
  return a == b || (std::isnan(a) && std::isnan(b)) ||
         std::abs(a - b) <= kRounding * std::max(std::abs(a), std::abs(b));
}

// Of nodes that hold some of the parameter: the others have nothing that could be dropped or written.
absl::Status ComparePresence(const ShardPlan& plan, const std::vector<const Reduced*>& of_nodes, size_t param) {
  const auto has = [&](size_t n) { return (of_nodes[n]->present()[param / 8] >> (param % 8) & 1) != 0; };
  const auto holds = [&](size_t n) {
    return !plan.cut_over_nodes || NodeRangeOf(plan, static_cast<int>(param), static_cast<int>(n)).numel > 0;
  };
  size_t differs = 1;  // most are alike on all nodes, whoever holds them
  while (differs < of_nodes.size() && has(differs) == has(0)) ++differs;
  if (differs == of_nodes.size()) return absl::OkStatus();
  size_t first = 0;
  while (first < of_nodes.size() && !holds(first)) ++first;
  for (size_t other = first + 1; other < of_nodes.size(); ++other) {
    if (has(other) != has(first) && holds(other)) {
      return absl::FailedPreconditionError(
          absl::StrCat("Step ", of_nodes[0]->step(), ": the gradient of \"", plan.params[param].fqn, "\" is ",
                       has(other) ? "there" : "dropped", " on ", NodeText(plan, static_cast<int>(other)), " and ",
                       has(first) ? "there" : "dropped", " on node ", first,
                       "; trainers of all nodes must drop or write the same gradients"));
    }
  }
  return absl::OkStatus();
}

// What trainers make of alike gradients is theirs: it differs also where their values or CPUs do.
absl::Status NoReplica(const ShardPlan& plan, int64_t step, size_t node, size_t other, const std::string& difference) {
  const bool in_trainers = plan.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  return absl::InternalError(absl::StrCat(
      "Step ", step, ": ", NodeText(plan, static_cast<int>(node)), " is no replica of ",
      NodeText(plan, static_cast<int>(other)), " any more: ", difference,
      in_trainers ? "; give all nodes the same values, seeds and hyperparameters, and CPUs and builds of torch that "
                    "compute the same bits, and go on from a checkpoint; or "
                  : "; ",
      HasRows(plan) ? "leave out the node whose memory or devices are at fault, and go on from a checkpoint"
                    : "replace the node whose memory or devices are at fault, whose daemon is then sent the other's "
                      "state"));
}

absl::Status CompareNorms(const ShardPlan& plan, const std::vector<const Reduced*>& of_nodes) {
  const auto row = static_cast<size_t>(NodesOfRow(plan));
  for (size_t node = row; node < of_nodes.size(); ++node) {
    const Reduced& first = *of_nodes[node % row];
    const Reduced& other = *of_nodes[node];
    if (!SameWithinRounding(other.norm_scale(), first.norm_scale()) ||
        !SameWithinRounding(other.norm_sum(), first.norm_sum())) {
      return NoReplica(plan, first.step(), node, node % row,
                       absl::StrCat("its gradients have another norm (got a sum of ", other.norm_sum(), " in units of ",
                                    other.norm_scale(), ", want ", first.norm_sum(), " of ", first.norm_scale(), ")"));
    }
  }
  return absl::OkStatus();
}

// Of the nodes with one place.
absl::Status CompareDigests(const ShardPlan& plan, const std::vector<const Reduced*>& of_nodes, size_t place) {
  const auto row = static_cast<size_t>(NodesOfRow(plan));
  size_t first = place;
  for (size_t node = place; node < of_nodes.size(); node += row) {
    const auto& got = of_nodes[node]->digests();
    const auto& want = of_nodes[first]->digests();
    if (want.empty()) {
      first = node;
      continue;
    }
    for (int param = 0; param < got.size(); ++param) {
      if (got[param] != want[param]) {
        const ParamPlan& differs = plan.params[static_cast<size_t>(param) % plan.params.size()];
        return NoReplica(
            plan, of_nodes[0]->step(), node, first,
            absl::StrCat("\"", differs.fqn, "\" of group \"", plan.groups[static_cast<size_t>(differs.group)].name,
                         "\", or its optimizer state, is another one behind step ", of_nodes[0]->step() - 1));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

int DigestsOfNode(const ShardPlan& plan) { return static_cast<int>(plan.params.size()) * (HasRows(plan) ? 2 : 1); }

std::string NodeText(const ShardPlan& plan, int node) {
  return absl::StrCat("node ", node, " (", plan.config.nodes().addresses(node), ")");
}

absl::Status CompareReduced(const ShardPlan& plan, const std::vector<const Reduced*>& of_nodes) {
  for (size_t param = 0; param < plan.params.size(); ++param) {
    SHARDD_RETURN_IF_ERROR(ComparePresence(plan, of_nodes, param));
  }
  SHARDD_RETURN_IF_ERROR(CompareNorms(plan, of_nodes));
  for (int place = 0; place < NodesOfRow(plan); ++place) {
    SHARDD_RETURN_IF_ERROR(CompareDigests(plan, of_nodes, static_cast<size_t>(place)));
  }
  return absl::OkStatus();
}

}  // namespace shardd
