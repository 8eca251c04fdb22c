#include "client/c/api/spec_json.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cctype>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/plan/slab_holes.h"
#include "common/status/status_macros.h"
#include "nlohmann/json.hpp"

namespace shardd {
namespace {

// "STRATEGY_FULL_SHARD" -> "full_shard".
std::string Word(const std::string& name, size_t prefix) {
  std::string word = name.substr(std::min(prefix, name.size()));
  std::transform(word.begin(), word.end(), word.begin(), [](unsigned char c) { return std::tolower(c); });
  return word;
}

}  // namespace

absl::StatusOr<v1::JobSpec> ParseSpecJson(const char* json, const LaunchEnvironment& environment) {
  if (json == nullptr || json[0] == '\0') {
    return absl::InvalidArgumentError("parse spec_json: it is empty (want a shardd.v1.JobSpec in JSON)");
  }
  v1::JobSpec spec;
  const auto status = google::protobuf::util::JsonStringToMessage(json, &spec);
  if (!status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("parse spec_json: it is no shardd.v1.JobSpec in proto3 JSON: ",
                                                   std::string(status.message().data(), status.message().size())));
  }
  if (spec.config().grace_ms() == 0 && environment.grace_ms > 0) {
    spec.mutable_config()->set_grace_ms(environment.grace_ms);
  }
  if (spec.world_size() == 0) {
    const bool several = spec.config().has_nodes();
    const int world_size = several ? environment.local_world_size : environment.world_size;
    if (world_size == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("parse spec_json: job \"", spec.name(), "\" has no world size (got worldSize 0 and no ",
                       several ? "LOCAL_WORLD_SIZE" : "WORLD_SIZE", "); give one of them"));
    }
    spec.set_world_size(world_size);
  }
  return spec;
}

std::string PlanToJson(const v1::JobSpec& spec, const ShardPlan& plan) {
  using Json = nlohmann::ordered_json;
  Json root;
  root["name"] = spec.name();
  root["world_size"] = plan.world_size;
  root["node"] = plan.node;
  root["shard_world_size"] = plan.placement.shard_world_size;
  root["strategy"] = Word(v1::Strategy_Name(plan.config.strategy()), sizeof("STRATEGY_") - 1);
  root["replicas"] = plan.placement.replicas;
  root["shard_groups"] = Json::array();
  for (const v1::ShardGroup& group : plan.config.shard_groups()) {
    root["shard_groups"].push_back(std::vector<int>(group.ranks().begin(), group.ranks().end()));
  }
  const auto spread = [](v1::Spread value) { return Word(v1::Spread_Name(value), sizeof("SPREAD_") - 1); };
  root["placement"] = {{"parameters", spread(plan.config.placement().parameters())},
                       {"gradients", spread(plan.config.placement().gradients())},
                       {"optimizer", spread(plan.config.placement().optimizer())}};
  const PlacedMemory placed = PredictPlacedMemory(plan);
  root["placed_bytes_per_rank"] = {{"parameters", placed.parameters_bytes},
                                   {"gradients", placed.gradients_bytes},
                                   {"optimizer", placed.optimizer_bytes},
                                   {"post_forward", placed.post_forward_bytes}};
  root["layout"] = Word(v1::Layout_Name(plan.config.layout()), sizeof("LAYOUT_") - 1);
  root["unshard_mode"] = Word(v1::UnshardMode_Name(plan.config.unshard_mode()), sizeof("UNSHARD_MODE_") - 1);
  root["offload"] = Word(v1::Offload_Name(plan.config.offload()), sizeof("OFFLOAD_") - 1);
  root["digest"] = absl::BytesToHexString(plan.digest);
  root["bytes"] = {{"shards", plan.memory.held_shards_bytes},
                   {"parameters", plan.memory.held_parameters_bytes},
                   {"gradients", plan.memory.held_gradients_bytes},
                   {"optimizer", plan.memory.held_optimizer_bytes},
                   {"unsharded_pool", plan.memory.unsharded_pool_bytes},
                   {"gradient_staging", plan.memory.gradient_staging_bytes},
                   {"node_receive", plan.memory.node_receive_bytes},
                   {"update_workspace", plan.memory.workspace_bytes},
                   {"snapshot", plan.memory.held_kept_bytes},
                   {"journal", plan.memory.journal_bytes},
                   {"undo", plan.memory.undo_bytes},
                   {"session_per_rank", plan.memory.session_bytes},
                   {"gradient_slots_per_rank", plan.memory.gradient_slots_bytes},
                   {"gather_staging_per_rank_on_gpus", plan.memory.gather_staging.stride_bytes},
                   {"total", plan.memory.TotalBytes(plan.world_size)},
                   {"total_on_gpus", MemoryOnGpus(plan, plan.world_size).TotalBytesOnGpus(plan.world_size)}};
  root["groups"] = Json::array();
  for (const GroupPlan& group : plan.groups) {
    Json entry;
    entry["name"] = group.name;
    entry["depth"] = group.depth;
    entry["numel"] = group.numel;
    entry["reshard_after_forward"] = group.reshard_after_forward;
    entry["post_forward_shard_size"] = group.post_forward_shard_size;
    entry["trainable"] = group.gradient_slot >= 0;
    entry["gradient_slot"] = group.gradient_slot;
    entry["unsharded_bytes"] = group.unsharded_bytes;
    entry["also_unshards"] = Json::array();
    for (const int other : group.also_unshards) {
      entry["also_unshards"].push_back(plan.groups[static_cast<size_t>(other)].name);
    }
    entry["flat_parameters"] = Json::array();
    for (const int index : group.flat_params) {
      const FlatParamPlan& flat = plan.flat_params[static_cast<size_t>(index)];
      entry["flat_parameters"].push_back({{"dtype", std::string(DTypeName(flat.dtype))},
                                          {"unsharded_dtype", std::string(DTypeName(flat.unsharded_dtype))},
                                          {"requires_grad", flat.requires_grad},
                                          {"numel", flat.numel},
                                          {"padded_numel", flat.padded_numel},
                                          {"shard_numel", flat.shard_numel}});
    }
    root["groups"].push_back(std::move(entry));
  }
  root["parameters"] = Json::array();
  for (const ParamPlan& param : plan.params) {
    root["parameters"].push_back({{"fqn", param.fqn},
                                  {"aliases", param.aliases},
                                  {"shape", param.shape},
                                  {"numel", param.numel},
                                  {"dtype", std::string(DTypeName(param.dtype))},
                                  {"requires_grad", param.requires_grad},
                                  {"group", plan.groups[static_cast<size_t>(param.group)].name},
                                  {"flat_parameter", param.flat_param},
                                  {"offset_numel", param.offset},
                                  {"optimizer_group", param.optimizer_group}});
  }
  // Names come from the trainer; bytes that are no UTF-8 are replaced rather than thrown about.
  return root.dump(2, ' ', false, Json::error_handler_t::replace);
}

}  // namespace shardd
