#include "client/ctl/offline.h"

#include <cstdio>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/ctl/format.h"
#include "client/ctl/plan.h"
#include "client/ctl/predict/predict.h"
#include "common/status/status_macros.h"

namespace shardd::ctl {
namespace {

absl::StatusOr<std::string> Plan(const Options& options, const std::string& model) {
  SHARDD_ASSIGN_OR_RETURN(const PlannedModel planned, PlanModel(model, options.world, options.nodes, options.gpus));
  if (options.json) return ToJson(planned.memory, /*one_line=*/false);
  return planned.text;
}

absl::StatusOr<std::string> Foretell(const Options& options, const std::string& model) {
  SHARDD_ASSIGN_OR_RETURN(const std::string machine, ReadTextFile(options.machine));
  SHARDD_ASSIGN_OR_RETURN(const PredictedModel predicted,
                          PredictModel(model, options.world, options.nodes, machine,
                                       {static_cast<double>(options.tokens), options.checkpointing}));
  if (!options.picture.empty()) {
    std::ofstream out(options.picture);
    if (!(out << predicted.picture << std::flush)) {
      return absl::FailedPreconditionError(absl::StrCat("cannot write \"", options.picture, "\""));
    }
  }
  return options.json ? predicted.json : predicted.text;
}

}  // namespace

absl::Status RunOffline(const Options& options) {
  const auto failed = [&](const absl::Status& status) {
    const char* const name = options.command == Command::kPlan ? "plan" : "predict";
    return absl::Status(status.code(), absl::StrCat(name, ": ", status.message()));
  };
  const absl::StatusOr<std::string> model = ReadTextFile(options.model);
  if (!model.ok()) return failed(model.status());
  const absl::StatusOr<std::string> text =
      options.command == Command::kPlan ? Plan(options, *model) : Foretell(options, *model);
  if (!text.ok()) return failed(text.status());
  std::fputs(text->c_str(), stdout);
  return absl::OkStatus();
}

}  // namespace shardd::ctl
