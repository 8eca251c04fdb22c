#include "client/ctl/predict/predict.h"

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/ctl/format.h"
#include "client/ctl/plan.h"
#include "client/ctl/predict/machine.h"
#include "client/ctl/predict/picture.h"
#include "client/ctl/predict/simulation.h"
#include "client/ctl/predict/transfers.h"
#include "client/ctl/table.h"
#include "common/plan/node_part.h"
#include "common/plan/plan.h"
#include "common/status/status_macros.h"

namespace shardd::ctl {
namespace {

constexpr size_t kShownGroups = 5;

// Bytes of one rank's device, by what they are for. Of a fleet that is larger than its plan, by the fleet's shares.
struct RankMemory {
  double shards = 0;
  double optimizer = 0;
  double gradients = 0;
  double pool = 0;
  double staging = 0;
  double slots = 0;
  double total() const { return shards + optimizer + gradients + pool + staging + slots; }
};

RankMemory MemoryOf(const ShardPlan& plan, const Fleet& fleet) {
  const MemoryPlan& memory = plan.memory;
  const double ranks = plan.world_size;
  const bool one_row = plan.cut_over_nodes && !HasRows(plan);
  const double share = one_row ? static_cast<double>(plan.nodes()) / fleet.nodes : 1;
  RankMemory rank;
  rank.shards = static_cast<double>(memory.held_shards_bytes) / ranks * share;
  rank.optimizer = static_cast<double>(memory.held_optimizer_bytes) / ranks * share;
  rank.gradients = static_cast<double>(memory.held_gradients_bytes) / ranks * share;
  rank.pool = static_cast<double>(memory.unsharded_pool_bytes + memory.parameters_bytes) / ranks;
  rank.staging = (static_cast<double>(memory.gradient_staging_bytes) +
                  static_cast<double>(fleet.gpus ? 0 : memory.node_receive_bytes + memory.workspace_bytes)) /
                     ranks +
                 static_cast<double>(fleet.gpus ? memory.gather_staging.stride_bytes : 0);
  rank.slots = static_cast<double>(memory.gradient_slots_bytes);
  return rank;
}

struct Found {
  const ShardPlan& plan;
  const Fleet& fleet;
  const Machine& machine;
  const Load& load;
  const Prediction& prediction;
  RankMemory memory;
  std::string title;
};

std::vector<int> MostExposed(const Prediction& prediction) {
  std::vector<int> groups(prediction.exposed_unshard_of_group_s.size());
  std::iota(groups.begin(), groups.end(), 0);
  const auto exposed = [&](int group) { return prediction.exposed_unshard_of_group_s[static_cast<size_t>(group)]; };
  std::stable_sort(groups.begin(), groups.end(), [&](int a, int b) { return exposed(a) > exposed(b); });
  while (!groups.empty() && (groups.size() > kShownGroups || exposed(groups.back()) <= 0)) groups.pop_back();
  return groups;
}

std::string PredictionText(const Found& found) {
  const Prediction& p = found.prediction;
  std::string text = absl::StrCat(found.title, "\n");
  Table times({{"STEP"}, {"ms", Align::kRight}, {"SHARE", Align::kRight}});
  const auto add = [&](const char* what, double seconds) {
    times.AddRow({what, absl::StrFormat("%.2f", seconds * 1e3), absl::StrFormat("%.1f %%", 100 * seconds / p.step_s)});
  };
  add("computation", p.compute_s);
  add("waiting for unshards", p.exposed_unshard_s);
  add("waiting for reductions", p.exposed_reduction_s);
  add("update", p.update_s);
  add("requests and commit", p.rest_s);
  add("total", p.step_s);
  absl::StrAppend(&text, times.Render(/*color=*/false));
  absl::StrAppendFormat(&text, "%.0f tokens/s of a rank, %.4g of all; %d unshards, %d of them begun ahead\n",
                        found.load.tokens / p.step_s,
                        found.load.tokens / p.step_s * found.fleet.nodes * found.fleet.ranks, p.unshards, p.prefetched);
  Table links({{"LINK OF A RANK"}, {"MiB", Align::kRight}, {"BUSY", Align::kRight}});
  const auto link = [&](const char* what, double bytes, double rate) {
    links.AddRow(
        {what, absl::StrFormat("%.1f", bytes / (1 << 20)), absl::StrFormat("%.1f %%", 100 * bytes / rate / p.step_s)});
  };
  link("to other nodes", p.traffic.node_link_bytes, found.machine.node_link_bytes_per_s);
  link("within the node", p.traffic.device_link_bytes, found.machine.device_link_bytes_per_s);
  absl::StrAppend(&text, links.Render(/*color=*/false));
  Table memory({{"MEMORY OF A RANK"}, {"MiB", Align::kRight}});
  for (const auto& [what, bytes] : {std::pair<const char*, double>{"shards", found.memory.shards},
                                    {"optimizer", found.memory.optimizer},
                                    {"gradients", found.memory.gradients},
                                    {"unsharded", found.memory.pool},
                                    {"staging", found.memory.staging},
                                    {"gradient slots", found.memory.slots},
                                    {"total", found.memory.total()}}) {
    memory.AddRow({what, absl::StrFormat("%.1f", bytes / (1 << 20))});
  }
  absl::StrAppend(&text, memory.Render(/*color=*/false), "Activations and the trainer's program come on top.\n");
  for (const int group : MostExposed(p)) {
    absl::StrAppendFormat(&text, "waited for: %s, %.2f ms\n",
                          Printable(found.plan.groups[static_cast<size_t>(group)].name),
                          p.exposed_unshard_of_group_s[static_cast<size_t>(group)] * 1e3);
  }
  return text;
}

std::string PredictionJson(const Found& found) {
  const Prediction& p = found.prediction;
  nlohmann::ordered_json root;
  root["ranks"] = found.fleet.nodes * found.fleet.ranks;
  root["nodes"] = found.fleet.nodes;
  root["tokens_per_s"] = found.load.tokens / p.step_s * found.fleet.nodes * found.fleet.ranks;
  root["step_s"] = p.step_s;
  root["compute_s"] = p.compute_s;
  root["exposed_unshard_s"] = p.exposed_unshard_s;
  root["exposed_reduction_s"] = p.exposed_reduction_s;
  root["update_s"] = p.update_s;
  root["rest_s"] = p.rest_s;
  root["unshards"] = p.unshards;
  root["prefetched"] = p.prefetched;
  root["node_link_bytes"] = p.traffic.node_link_bytes;
  root["device_link_bytes"] = p.traffic.device_link_bytes;
  root["memory_bytes"] = {{"shards", found.memory.shards},       {"optimizer", found.memory.optimizer},
                          {"gradients", found.memory.gradients}, {"unsharded", found.memory.pool},
                          {"staging", found.memory.staging},     {"gradient_slots", found.memory.slots},
                          {"total", found.memory.total()}};
  root["exposed_unshard_of_group_s"] = nlohmann::ordered_json::object();
  for (size_t group = 0; group < found.plan.groups.size(); ++group) {
    root["exposed_unshard_of_group_s"][found.plan.groups[group].name] = p.exposed_unshard_of_group_s[group];
  }
  return root.dump(2, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace

absl::StatusOr<PredictedModel> PredictModel(absl::string_view model, int world, int nodes,
                                            absl::string_view machine_json, const Load& load) {
  SHARDD_ASSIGN_OR_RETURN(const Machine machine, ParseMachine(machine_json));
  int planned_nodes = std::min(nodes, kMaxNodes);
  const int all_ranks = world;
  if (nodes > planned_nodes) {
    if (world % nodes != 0) {
      return absl::InvalidArgumentError(absl::StrCat("model: each node has as many ranks as the others (got ", world,
                                                     " ranks on ", nodes, " nodes)"));
    }
    world = world / nodes * planned_nodes;
  }
  SHARDD_ASSIGN_OR_RETURN(v1::JobSpec spec, ReadModel(model, world, planned_nodes));
  // Whole rows of nodes, where shard groups span them.
  const int row = spec.config().shard_group_size() / std::max(1, spec.world_size());
  if (nodes > planned_nodes && row > 1) {
    if (nodes % row != 0 || row > kMaxNodes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "model: shard groups are of whole nodes, alike on all (got groups of ", row, " nodes, ", nodes, " nodes)"));
    }
    planned_nodes -= planned_nodes % row;
    SHARDD_ASSIGN_OR_RETURN(spec, ReadModel(model, all_ranks / nodes * planned_nodes, planned_nodes));
  }
  if (machine.gpus && spec.world_size() > 1) {  // as the daemon makes of a job whose ranks have GPUs of their own
    spec.mutable_config()->set_unshard_mode(v1::UNSHARD_MODE_POOLED);
    spec.mutable_config()->set_unsharded_pools(spec.world_size());
  }
  SHARDD_ASSIGN_OR_RETURN(ShardPlan planned, PlanShards(spec));
  const auto plan = std::make_shared<const ShardPlan>(std::move(planned));
  const Fleet fleet = {nodes > planned_nodes ? nodes : plan->nodes(), plan->world_size, machine.gpus};
  SHARDD_ASSIGN_OR_RETURN(const Prediction prediction, Predict(plan, fleet, machine, load));
  const std::string title = absl::StrCat(
      Printable(spec.name()), machine.name.empty() ? "" : absl::StrCat(" on ", Printable(machine.name)), ": ",
      fleet.nodes * fleet.ranks, " ranks on ", fleet.nodes, fleet.nodes == 1 ? " node, " : " nodes, ",
      absl::AsciiStrToLower(v1::Strategy_Name(plan->config.strategy()).substr(9)), ", ", load.tokens,
      " tokens of a rank",
      fleet.nodes > kMaxNodes ? absl::StrCat(" (more than ", kMaxNodes, " nodes are not served)") : "");
  const Found found = {*plan, fleet, machine, load, prediction, MemoryOf(*plan, fleet), title};
  return PredictedModel{PredictionText(found), PredictionJson(found), DrawStep(prediction, *plan, title)};
}

}  // namespace shardd::ctl
