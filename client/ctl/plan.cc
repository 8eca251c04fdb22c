#include "client/ctl/plan.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/format.h"
#include "client/ctl/table.h"
#include "common/plan/largest_node.h"
#include "common/plan/plan.h"
#include "common/plan/slab_holes.h"
#include "common/status/status_macros.h"

namespace shardd::ctl {
namespace {

absl::StatusOr<v1::JobSpec> Parse(absl::string_view json) {
  v1::JobSpec spec;
  const auto status = google::protobuf::util::JsonStringToMessage({json.data(), json.size()}, &spec);
  if (!status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("model: this is no shardd.v1.JobSpec in proto3 JSON: ",
                                                   std::string(status.message().data(), status.message().size())));
  }
  if (spec.name().empty()) spec.set_name("model");
  return spec;
}

// As many ranks and nodes as are asked for. What addresses the nodes have makes no difference to memory.
absl::Status Spread(int world, int nodes, v1::JobSpec* spec) {
  const int had = std::max(1, spec->config().nodes().addresses_size());
  if (nodes == 0) nodes = had;
  if (world == 0) world = spec->world_size() * had;
  if (world == 0) {
    return absl::InvalidArgumentError("model: how many ranks there are is not said (got no --world, and no worldSize)");
  }
  if (world % nodes != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("model: each node has as many ranks as the others (got ", world, " ranks on ", nodes, " nodes)"));
  }
  spec->set_world_size(world / nodes);
  if (nodes == had) return absl::OkStatus();
  if (spec->has_config()) spec->mutable_config()->clear_nodes();
  for (int node = 0; nodes > 1 && node < nodes; ++node) {
    spec->mutable_config()->mutable_nodes()->add_addresses(absl::StrCat("node", node, ":7100"));
  }
  return absl::OkStatus();
}

v1::Memory Describe(const v1::JobSpec& spec, const ShardPlan& plan, bool on_gpus) {
  const MemoryPlan memory = on_gpus ? MemoryOnGpus(plan, plan.world_size) : plan.memory;
  v1::Memory described;
  described.set_job(spec.name());
  const auto add = [&described](absl::string_view purpose, int64_t bytes) {
    if (bytes == 0) return;
    v1::Purpose* const added = described.add_purposes();
    added->set_purpose(std::string(purpose));
    added->set_planned_bytes(bytes);
  };
  // As shardctl memory names them.
  add("shards", memory.held_shards_bytes);
  add("parameters", memory.held_parameters_bytes);
  add("gradients", memory.held_gradients_bytes);
  add("optimizer", memory.held_optimizer_bytes);
  add("unsharded pool", memory.unsharded_pool_bytes);
  add("gradient staging", memory.gradient_staging_bytes);
  add("gather staging", on_gpus ? memory.gather_staging.stride_bytes * plan.world_size : 0);
  add("node receive", on_gpus ? 0 : memory.node_receive_bytes);
  add("update workspace", on_gpus ? 0 : memory.workspace_bytes);
  add("snapshot", memory.held_kept_bytes);
  add("journal", memory.journal_bytes);
  add("writeback undo", memory.undo_bytes);
  add("session", memory.session_bytes * plan.world_size);
  described.set_planned_bytes(on_gpus ? memory.TotalBytesOnGpus(plan.world_size) : memory.TotalBytes(plan.world_size));
  return described;
}

std::string Text(const LargestNode& largest_node, const v1::Memory& memory) {
  const ShardPlan& plan = largest_node.plan;
  int64_t numel = 0;
  for (const ParamPlan& param : plan.params) numel += param.numel;
  const int nodes = plan.nodes();
  std::string text = absl::StrCat(memory.job(), ": ", numel, " parameters in ", plan.groups.size(), " groups, ",
                                  plan.world_size * nodes, " ranks on ", nodes, nodes == 1 ? " node, " : " nodes, ",
                                  absl::AsciiStrToLower(v1::Strategy_Name(plan.config.strategy()).substr(9)), "\n");
  Table table({{"PURPOSE"}, {"NODE", Align::kRight}, {"PER RANK", Align::kRight}});
  for (const v1::Purpose& purpose : memory.purposes()) {
    table.AddRow(
        {purpose.purpose(), FormatMiB(purpose.planned_bytes()), FormatMiB(purpose.planned_bytes() / plan.world_size)});
  }
  table.AddRow({"total", FormatMiB(memory.planned_bytes()), FormatMiB(memory.planned_bytes() / plan.world_size)});
  const auto largest =
      std::max_element(plan.groups.begin(), plan.groups.end(),
                       [](const GroupPlan& a, const GroupPlan& b) { return a.unsharded_bytes < b.unsharded_bytes; });
  absl::StrAppend(&text, table.Render(/*color=*/false));
  if (largest_node.least_bytes < largest_node.total_bytes) {
    absl::StrAppend(&text, "node ", plan.node,
                    " needs most; the least that a node needs: ", FormatMiB(largest_node.least_bytes), "\n");
  }
  if (largest != plan.groups.end()) {
    absl::StrAppend(&text, "largest group ", Printable(largest->name), ": ", FormatMiB(largest->unsharded_bytes),
                    " unsharded. Activations and the trainers' programs come on top.\n");
  }
  return text;
}

}  // namespace

absl::StatusOr<v1::JobSpec> ReadModel(absl::string_view json, int world, int nodes) {
  SHARDD_ASSIGN_OR_RETURN(v1::JobSpec spec, Parse(json));
  SHARDD_RETURN_IF_ERROR(Spread(world, nodes, &spec));
  return spec;
}

absl::StatusOr<PlannedModel> PlanModel(absl::string_view json, int world, int nodes, bool on_gpus) {
  SHARDD_ASSIGN_OR_RETURN(const v1::JobSpec spec, ReadModel(json, world, nodes));
  SHARDD_ASSIGN_OR_RETURN(const LargestNode largest, PlanLargestNode(spec, on_gpus));
  PlannedModel planned;
  planned.memory = Describe(spec, largest.plan, on_gpus);
  planned.text = Text(largest, planned.memory);
  return planned;
}

absl::StatusOr<std::string> ReadTextFile(const std::string& file) {
  if (file == "-") return std::string(std::istreambuf_iterator<char>(std::cin), {});
  std::ifstream in(file);
  if (!in) return absl::FailedPreconditionError(absl::StrCat("cannot read \"", file, "\": ", std::strerror(errno)));
  return std::string(std::istreambuf_iterator<char>(in), {});
}

}  // namespace shardd::ctl
