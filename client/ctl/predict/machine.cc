#include "client/ctl/predict/machine.h"

#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"

namespace shardd::ctl {
namespace {

using MachineJson = nlohmann::json;

absl::Status NoMachine(absl::string_view fact) {
  return absl::InvalidArgumentError(
      absl::StrCat("this is no description of a machine: ", fact, "; see client/docs/configuration.md#prediction"));
}

absl::Status ReadNumber(const std::string& name, const MachineJson& value, double* out) {
  if (!value.is_number() || value.get<double>() < 0) {
    return NoMachine(absl::StrCat(name, " is no number of zero or more (got ", value.dump().substr(0, 40), ")"));
  }
  *out = value.get<double>();
  return absl::OkStatus();
}

absl::Status ReadGroups(const MachineJson& groups, Machine* machine) {
  if (!groups.is_object()) return NoMachine("groups is no object");
  for (const auto& [name, cost] : groups.items()) {
    if (!cost.is_object()) return NoMachine(absl::StrCat("groups.", name, " is no object"));
    GroupCost& of_group = machine->groups[name];
    for (const auto& [key, value] : cost.items()) {
      double* const out = key == "forwardS"               ? &of_group.forward_s
                          : key == "backwardS"            ? &of_group.backward_s
                          : key == "forwardFlopsPerToken" ? &of_group.forward_flops_per_token
                                                          : nullptr;
      if (out == nullptr) return NoMachine(absl::StrCat("groups.", name, " has an unknown member ", key));
      if (absl::Status read = ReadNumber(absl::StrCat("groups.", name, ".", key), value, out); !read.ok()) return read;
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Machine> ParseMachine(absl::string_view json) {
  const MachineJson root = MachineJson::parse(json.begin(), json.end(), nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) return NoMachine("it is no JSON object");
  Machine machine;
  const std::map<std::string, double*> rates = {{"flopsPerS", &machine.flops_per_s},
                                                {"memoryBytesPerS", &machine.memory_bytes_per_s},
                                                {"deviceLinkBytesPerS", &machine.device_link_bytes_per_s},
                                                {"nodeLinkBytesPerS", &machine.node_link_bytes_per_s}};
  const std::map<std::string, double*> times = {{"transferS", &machine.transfer_s},
                                                {"otherNodeS", &machine.other_node_s},
                                                {"requestS", &machine.request_s},
                                                {"stepS", &machine.step_s}};
  for (const auto& [key, value] : root.items()) {
    absl::Status read;
    if (const auto rate = rates.find(key); rate != rates.end()) {
      read = ReadNumber(key, value, rate->second);
    } else if (const auto time = times.find(key); time != times.end()) {
      read = ReadNumber(key, value, time->second);
    } else if (key == "groups") {
      read = ReadGroups(value, &machine);
    } else if (key == "name" && value.is_string()) {
      machine.name = value.get<std::string>();
    } else if (key == "sharesCores" && value.is_boolean()) {
      machine.shares_cores = value.get<bool>();
    } else if (key == "gpus" && value.is_boolean()) {
      machine.gpus = value.get<bool>();
    } else {
      read = NoMachine(absl::StrCat("member ", key, " is unknown, or of another type"));
    }
    if (!read.ok()) return read;
  }
  for (const auto& [key, rate] : rates) {
    if (*rate <= 0) return NoMachine(absl::StrCat(key, " is not given (want above zero)"));
  }
  return machine;
}

}  // namespace shardd::ctl
