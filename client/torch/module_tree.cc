#include "client/torch/module_tree.h"

#include <map>
#include <nlohmann/json.hpp>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace shardd {
namespace {

using Json = nlohmann::json;

std::string DTypeName(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "DTYPE_FLOAT32";
    case at::kBFloat16:
      return "DTYPE_BFLOAT16";
    case at::kHalf:
      return "DTYPE_FLOAT16";
    case at::kDouble:
      return "DTYPE_FLOAT64";
    case at::kLong:
      return "DTYPE_INT64";
    case at::kInt:
      return "DTYPE_INT32";
    case at::kShort:
      return "DTYPE_INT16";
    case at::kChar:
      return "DTYPE_INT8";
    case at::kByte:
      return "DTYPE_UINT8";
    case at::kBool:
      return "DTYPE_BOOL";
    default:
      return "DTYPE_UNSPECIFIED";  // refused by the plan, which names the parameter
  }
}

// What makes two parameters one: the same elements of the same storage.
using TieKey = std::tuple<const void*, int64_t, std::vector<int64_t>>;
TieKey KeyOf(const at::Tensor& tensor) {
  return {tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset(), tensor.sizes().vec()};
}

Json TreeJson(const torch::nn::Module& root, const ShardOptions& options) {
  const auto modules = root.named_modules();
  // Ids in the order of first appearance, only for what appears twice: no addresses, so all ranks say the same.
  std::map<TieKey, int> uses;
  for (const auto& module : modules) {
    for (const auto& parameter : module.value()->named_parameters(/*recurse=*/false)) {
      ++uses[KeyOf(parameter.value())];
    }
  }
  std::map<TieKey, int> ids;
  std::unordered_map<std::string, int> index_by_name;
  Json list = Json::array();
  for (const auto& module : modules) {
    const std::string& name = module.key();
    const size_t dot = name.rfind('.');
    int parent = -1;
    if (!name.empty()) {
      parent = index_by_name.at(dot == std::string::npos ? std::string() : name.substr(0, dot));
    }
    index_by_name.emplace(name, static_cast<int>(list.size()));
    Json entry = {{"name", name}, {"className", ModuleClassName(*module.value())}, {"parent", parent}};
    const auto override_it = options.reshard_after_forward.find(name);
    if (override_it != options.reshard_after_forward.end()) {
      entry["reshardAfterForward"] = override_it->second ? "OVERRIDE_YES" : "OVERRIDE_NO";
    }
    Json parameters = Json::array();
    for (const auto& parameter : module.value()->named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = parameter.value();
      Json item = {{"name", parameter.key()},
                   {"shape", tensor.sizes().vec()},
                   {"dtype", DTypeName(tensor.scalar_type())},
                   {"requiresGrad", tensor.requires_grad()}};
      const TieKey key = KeyOf(tensor);
      if (uses.at(key) > 1) {
        item["storageId"] = ids.emplace(key, static_cast<int>(ids.size()) + 1).first->second;
      }
      parameters.push_back(std::move(item));
    }
    entry["parameters"] = std::move(parameters);
    list.push_back(std::move(entry));
  }
  return {{"modules", std::move(list)}};
}

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
  static constexpr const char* kKinds[] = {"OPTIMIZER_KIND_NONE", "OPTIMIZER_KIND_ADAMW", "OPTIMIZER_KIND_SGD"};
  Json optimizer = {{"kind", kKinds[static_cast<int>(options.optimizer)]}, {"momentum", options.momentum}};
  for (const auto& fqns : options.optimizer_groups) {
    optimizer["groups"].push_back({{"fqns", fqns}});
  }
  return optimizer;
}

Json ConfigJson(const ShardOptions& options) {
  static constexpr const char* kStrategies[] = {"STRATEGY_FULL_SHARD", "STRATEGY_SHARD_GRAD_OP", "STRATEGY_NO_SHARD"};
  static constexpr const char* kLayouts[] = {"LAYOUT_FLAT", "LAYOUT_DIM0"};
  static constexpr const char* kModes[] = {"UNSHARD_MODE_ZERO_COPY", "UNSHARD_MODE_POOLED"};
  static constexpr const char* kPrefetch[] = {"BACKWARD_PREFETCH_PRE", "BACKWARD_PREFETCH_POST",
                                              "BACKWARD_PREFETCH_NONE"};
  Json mixed = Json::object();
  if (options.param_dtype) {
    mixed["paramDtype"] = DTypeName(*options.param_dtype);
  }
  if (options.reduce_dtype) {
    mixed["reduceDtype"] = DTypeName(*options.reduce_dtype);
  }
  return {{"strategy", kStrategies[static_cast<int>(options.strategy)]},
          {"layout", kLayouts[static_cast<int>(options.layout)]},
          {"mixedPrecision", std::move(mixed)},
          {"unshardMode", kModes[static_cast<int>(options.unshard_mode)]},
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
}

}  // namespace

std::string ModuleClassName(const torch::nn::Module& module) {
  std::string name = module.name();
  const size_t colon = name.rfind("::");
  if (colon != std::string::npos) {
    name = name.substr(colon + 2);
  }
  constexpr char kImpl[] = "Impl";
  constexpr size_t kImplLength = sizeof(kImpl) - 1;
  if (name.size() > kImplLength && name.compare(name.size() - kImplLength, kImplLength, kImpl) == 0) {
    name.resize(name.size() - kImplLength);
  }
  return name;
}

std::string JobSpecJson(const torch::nn::Module& root, const ShardOptions& options) {
  const Json spec = {{"name", options.job_name},
                     {"worldSize", options.world_size},
                     {"tree", TreeJson(root, options)},
                     {"policy", PolicyJson(options)},
                     {"config", ConfigJson(options)}};
  return spec.dump();
}

}  // namespace shardd
