#include "client/torch/job_spec.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "client/torch/module_tree.h"

namespace shardd {
namespace {

using Json = nlohmann::json;

Json PolicyJson(const ShardOptions& options) {
  Json policies = Json::array();
  if (!options.fully_shard_classes.empty()) {
    policies.push_back({{"classes", {{"classNames", options.fully_shard_classes}}}});
  }
  if (!options.fully_shard_fqns.empty()) {
    policies.push_back({{"fqns", {{"fqns", options.fully_shard_fqns}}}});
  }
  if (options.min_numel > 0) {
    policies.push_back({{"minNumel", {{"minNumel", options.min_numel}}}});
  }
  if (policies.empty()) {
    return Json::object();
  }
  return policies.size() == 1 ? policies[0] : Json{{"anyOf", {{"policies", std::move(policies)}}}};
}

Json OptimizerJson(const ShardOptions& options) {
  static constexpr const char* kKinds[] = {"OPTIMIZER_KIND_NONE",
                                           "OPTIMIZER_KIND_ADAMW",
                                           "OPTIMIZER_KIND_SGD",
                                           "OPTIMIZER_KIND_ADAM",
                                           "OPTIMIZER_KIND_ADAGRAD",
                                           "OPTIMIZER_KIND_RMSPROP",
                                           "OPTIMIZER_KIND_CENTERED_RMSPROP",
                                           "OPTIMIZER_KIND_LION",
                                           "OPTIMIZER_KIND_MUON",
                                           "OPTIMIZER_KIND_ADAFACTOR"};
  Json optimizer = {{"kind", kKinds[static_cast<int>(options.optimizer.kind)]},
                    {"momentum", options.optimizer.momentum}};
  for (const auto& fqns : options.optimizer.groups) {
    optimizer["groups"].push_back({{"fqns", fqns}});
  }
  return optimizer;
}

Json ConfigJson(const ShardOptions& options) {
  static constexpr const char* kStrategies[] = {"STRATEGY_FULL_SHARD", "STRATEGY_SHARD_GRAD_OP", "STRATEGY_NO_SHARD",
                                                "STRATEGY_HYBRID_SHARD", "STRATEGY_HYBRID_SHARD_ZERO2"};
  static constexpr const char* kLayouts[] = {"LAYOUT_FLAT", "LAYOUT_DIM0"};
  static constexpr const char* kModes[] = {"UNSHARD_MODE_ZERO_COPY", "UNSHARD_MODE_POOLED"};
  static constexpr const char* kPrefetch[] = {"BACKWARD_PREFETCH_PRE", "BACKWARD_PREFETCH_POST",
                                              "BACKWARD_PREFETCH_NONE"};
  Json mixed = Json::object();
  if (options.mixed_precision.param_dtype) {
    mixed["paramDtype"] = DTypeName(*options.mixed_precision.param_dtype);
  }
  if (options.mixed_precision.reduce_dtype) {
    mixed["reduceDtype"] = DTypeName(*options.mixed_precision.reduce_dtype);
  }
  mixed["keepLowPrecisionGrads"] = options.mixed_precision.keep_low_precision_grads;
  if (options.mixed_precision.float8_gathers) mixed["float8Gathers"] = true;  // which an earlier library refuses
  Json groups = Json::array();
  for (const std::vector<int>& ranks : options.shard_groups) {
    groups.push_back({{"ranks", ranks}});
  }
  Json config = {{"strategy", kStrategies[static_cast<int>(options.strategy)]},
                 {"shardGroupSize", options.shard_group_size},
                 {"shardGroups", std::move(groups)},
                 {"layout", kLayouts[static_cast<int>(options.layout)]},
                 {"mixedPrecision", std::move(mixed)},
                 {"maxInflightUnshards", options.max_inflight_unshards},
                 {"forwardPrefetch", options.forward_prefetch},
                 {"backwardPrefetch", kPrefetch[static_cast<int>(options.backward_prefetch)]},
                 {"optimizer", OptimizerJson(options)},
                 {"gradientDivideFactor", options.gradient_divide_factor},
                 {"strictOrder", options.strict_order},
                 {"allowMissingContribution", options.allow_missing_contribution},
                 {"silenceTimeoutMs", options.silence_timeout_ms},
                 {"graceMs", options.grace_ms},
                 // Parameters are mapped read-only and written by the daemon's optimizer.
                 {"trainersNeverWrite", true}};
  if (options.unshard_mode) {
    config["unshardMode"] = kModes[static_cast<int>(*options.unshard_mode)];
  }
  if (!options.nodes.addresses.empty()) {
    config["nodes"] = {{"addresses", options.nodes.addresses}};
  }
  return config;
}

}  // namespace

Status JobSpecJson(const torch::nn::Module& root, const ShardOptions& options, std::string* json) {
  Json tree;
  Status status = ModuleTreeJson(root, options, &tree);
  if (!status.ok()) {
    return status;
  }
  const Json spec = {{"name", options.job_name},
                     {"worldSize", options.world_size},
                     {"tree", std::move(tree)},
                     {"policy", PolicyJson(options)},
                     {"config", ConfigJson(options)}};
  // Bytes that are no UTF-8 are replaced; the daemon then refuses the name that has them.
  *json = spec.dump(-1, ' ', false, Json::error_handler_t::replace);
  return Status();
}

}  // namespace shardd
