#include "client/torch/module_tree.h"

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "client/torch/parameter_storage.h"

namespace shardd {
namespace {

using Json = nlohmann::json;

// What makes two parameters one: the same elements of the same storage.
using TieKey = std::tuple<const void*, int64_t, std::vector<int64_t>>;
TieKey KeyOf(const at::Tensor& tensor) {
  return {tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset(), tensor.sizes().vec()};
}

// Every module by name, in pre-order.
using Modules = torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>>;

std::string Child(const std::string& module, const std::string& name) {
  return module.empty() ? name : module + "." + name;
}

// "ignored", "replicate" or "already_sharded" by FQN, as the options give them.
class LeftOut {
 public:
  Status Read(const ShardOptions& options) {
    const std::pair<const char*, const std::vector<std::string>*> lists[] = {
        {"ignored", &options.ignored},
        {"replicate", &options.replicate},
        {"already_sharded", &options.already_sharded}};
    for (const auto& [mark, fqns] : lists) {
      for (const std::string& fqn : *fqns) {
        if (fqn.empty()) {
          return Status(Code::kInvalidArgument, std::string("describe module: options.") + mark +
                                                    " names the root; leave out what is below it");
        }
        const auto [known, added] = marks_.emplace(fqn, mark);
        if (!added) {
          return Status(Code::kInvalidArgument, "describe module \"" + fqn + "\": it is left out twice (got " + mark +
                                                    " and " + known->second + ")");
        }
      }
    }
    return Status();
  }
  // Whether `fqn` is left out, itself or with a module above it.
  bool Contains(const std::string& fqn) const {
    for (size_t end = fqn.size(); end != std::string::npos;
         end = end == 0 ? std::string::npos : fqn.rfind('.', end - 1)) {
      if (marks_.count(fqn.substr(0, end)) > 0) {
        return true;
      }
    }
    return false;
  }
  // Every mark has to name a module or a parameter.
  Status CheckNames(const Modules& modules) const {
    std::map<std::string, std::string> unknown = marks_;
    for (const auto& module : modules) {
      unknown.erase(module.key());
      for (const auto& parameter : module.value()->named_parameters(/*recurse=*/false)) {
        unknown.erase(Child(module.key(), parameter.key()));
      }
    }
    return unknown.empty()
               ? Status()
               : Status(Code::kInvalidArgument, "describe module: options." + unknown.begin()->second + " names \"" +
                                                    unknown.begin()->first + "\", which is no module and no parameter");
  }

 private:
  std::map<std::string, std::string> marks_;
};

// Every key has to name a module, and one that is not left out.
template <typename Value>
Status CheckKeys(const char* option, const std::map<std::string, Value>& by_fqn, const Modules& modules,
                 const LeftOut& left_out) {
  for (const auto& [fqn, value] : by_fqn) {
    if (!modules.contains(fqn) || left_out.Contains(fqn)) {
      return Status(Code::kInvalidArgument, std::string("describe module: options.") + option + " names \"" + fqn +
                                                "\", which is no module that shardd manages");
    }
  }
  return Status();
}

Status CheckParameter(const std::string& fqn, const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided) {
    return Status(Code::kInvalidArgument,
                  "shard parameter \"" + fqn + "\": it is no dense CPU tensor (got " + tensor.toString() + ")");
  }
  if (ParameterStorage::IsAdopted(tensor)) {
    return Status(
        Code::kFailedPrecondition,
        "shard parameter \"" + fqn +
            "\": it belongs to a ShardedModule already; shard a module once, or name the part that is sharded "
            "in ShardOptions.already_sharded");
  }
  return Status();
}

// Which parameters are tied. Ids in the order of first appearance, only for what appears twice: no addresses, so all
// ranks say the same.
class Ties {
 public:
  // Also checks every parameter.
  Status Read(const Modules& modules, const LeftOut& left_out) {
    std::map<TieKey, std::string> outside;
    for (const auto& module : modules) {
      for (const auto& parameter : module.value()->named_parameters(/*recurse=*/false)) {
        const std::string fqn = Child(module.key(), parameter.key());
        if (left_out.Contains(fqn)) {
          if (parameter.value().has_storage()) {
            outside.emplace(KeyOf(parameter.value()), fqn);
          }
          continue;
        }
        Status status = CheckParameter(fqn, parameter.value());
        if (!status.ok()) {
          return status;
        }
        uses_[KeyOf(parameter.value())].push_back(fqn);
      }
    }
    for (const auto& [key, fqns] : uses_) {
      if (const auto it = outside.find(key); it != outside.end()) {
        return Status(Code::kInvalidArgument, "describe module: the parameter \"" + it->second +
                                                  "\" is left out and shares memory with \"" + fqns.front() +
                                                  "\", which is not; leave out both or none");
      }
    }
    return Status();
  }
  // 0: not tied.
  int IdOf(const at::Tensor& tensor) {
    const TieKey key = KeyOf(tensor);
    return uses_.at(key).size() < 2 ? 0 : ids_.emplace(key, static_cast<int>(ids_.size()) + 1).first->second;
  }

 private:
  std::map<TieKey, std::vector<std::string>> uses_;
  std::map<TieKey, int> ids_;
};

Json ParametersJson(const std::string& module_name, const torch::nn::Module& module, const LeftOut& left_out,
                    Ties* ties) {
  Json parameters = Json::array();
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    if (left_out.Contains(Child(module_name, parameter.key()))) {
      continue;
    }
    const at::Tensor& tensor = parameter.value();
    Json item = {{"name", parameter.key()},
                 {"shape", tensor.sizes().vec()},
                 {"dtype", DTypeName(tensor.scalar_type())},
                 {"requiresGrad", tensor.requires_grad()}};
    if (const int id = ties->IdOf(tensor); id > 0) {
      item["storageId"] = id;
    }
    parameters.push_back(std::move(item));
  }
  return parameters;
}

}  // namespace

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

Status ModuleTreeJson(const torch::nn::Module& root, const ShardOptions& options, nlohmann::json* tree) {
  const Modules modules = root.named_modules();
  LeftOut left_out;
  Ties ties;
  Status status = left_out.Read(options);
  if (status.ok()) {
    status = left_out.CheckNames(modules);
  }
  if (status.ok()) {
    status = CheckKeys("reshard_after_forward", options.reshard_after_forward, modules, left_out);
  }
  if (status.ok()) {
    status = CheckKeys("post_forward_shard_size", options.post_forward_shard_size, modules, left_out);
  }
  if (status.ok()) {
    status = ties.Read(modules, left_out);
  }
  if (!status.ok()) {
    return status;
  }
  std::unordered_map<std::string, int> index_by_name;
  Json list = Json::array();
  for (const auto& module : modules) {
    const std::string& name = module.key();
    if (left_out.Contains(name)) {
      continue;  // with all below it, which are left out as well
    }
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
    if (const auto size = options.post_forward_shard_size.find(name); size != options.post_forward_shard_size.end()) {
      entry["postForwardShardSize"] = size->second;
    }
    entry["parameters"] = ParametersJson(name, *module.value(), left_out, &ties);
    list.push_back(std::move(entry));
  }
  *tree = {{"modules", std::move(list)}};
  return Status();
}

}  // namespace shardd
