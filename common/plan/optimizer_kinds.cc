#include "common/plan/optimizer_kinds.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/tensor/muon.h"

namespace shardd {
namespace {

using Hyper = v1::HyperParameters;

const HyperParameterRange kLr = {"lr", &Hyper::lr, false};
const HyperParameterRange kWeightDecay = {"weight_decay", &Hyper::weight_decay, false};
const HyperParameterRange kBeta1 = {"beta1", &Hyper::beta1, true};
const HyperParameterRange kBeta2 = {"beta2", &Hyper::beta2, true};
const HyperParameterRange kEps = {"eps", &Hyper::eps, false};
const HyperParameterRange kEps2 = {"eps2", &Hyper::eps2, false};
const HyperParameterRange kMomentum = {"momentum", &Hyper::momentum, false};
const HyperParameterRange kAlpha = {"alpha", &Hyper::alpha, true};
const HyperParameterRange kLrDecay = {"lr_decay", &Hyper::lr_decay, false};
const HyperParameterRange kInitial = {"initial_accumulator_value", &Hyper::initial_accumulator_value, false};

// What is not a range.
absl::Status CheckMomentum(const v1::OptimizerConfig& optimizer, int group, const Hyper& values) {
  const auto refuse = [group](const auto&... fact) {
    return absl::InvalidArgumentError(absl::StrCat("optimizer group ", group, ": ", fact...));
  };
  if (!std::isfinite(values.dampening())) {
    return refuse("dampening is not finite (got ", values.dampening(), ")");
  }
  if (values.nesterov() && (values.momentum() == 0 || values.dampening() != 0)) {
    return refuse("nesterov needs momentum and no dampening (got momentum ", values.momentum(), ", dampening ",
                  values.dampening(), ")");
  }
  if (values.momentum() > 0 && !HasMomentum(optimizer, group)) {
    return refuse("momentum without a planned buffer (got ", values.momentum(),
                  ", want 0); set OptimizerConfig.momentum, or its group's");
  }
  return absl::OkStatus();
}

// What is not a range of Muon's.
absl::Status CheckMuon(int group, const Hyper& values) {
  const auto refuse = [group](const auto&... fact) {
    return absl::InvalidArgumentError(absl::StrCat("optimizer group ", group, ": ", fact...));
  };
  if (!std::isfinite(values.ns_a()) || !std::isfinite(values.ns_b()) || !std::isfinite(values.ns_c())) {
    return refuse("ns_coefficients are not finite (got ", values.ns_a(), ", ", values.ns_b(), ", ", values.ns_c(), ")");
  }
  if (values.ns_steps() < 0 || values.ns_steps() > kMaxNewtonSchulzSteps) {
    return refuse("ns_steps is out of range (got ", values.ns_steps(), ", want 0 to ", kMaxNewtonSchulzSteps, ")");
  }
  if (!v1::AdjustLr_IsValid(values.adjust_lr())) {
    return refuse("adjust_lr is unknown (got ", static_cast<int>(values.adjust_lr()),
                  ", want ADJUST_LR_ORIGINAL or ADJUST_LR_MATCH_RMS_ADAMW)");
  }
  return absl::OkStatus();
}

// What is not a range of Adafactor's.
absl::Status CheckAdafactor(int group, const Hyper& values) {
  const auto refuse = [group](const auto&... fact) {
    return absl::InvalidArgumentError(absl::StrCat("optimizer group ", group, ": ", fact...));
  };
  if (!(values.beta2_decay() <= 0) || std::isinf(values.beta2_decay())) {
    return refuse("beta2_decay is out of range (got ", values.beta2_decay(), ", want finite, <= 0)");
  }
  if (!(values.eps() >= 0 || values.eps() == -1) || std::isinf(values.eps())) {
    return refuse("eps is out of range (got ", values.eps(), ", want finite, >= 0, or -1 for the dtype's)");
  }
  if (!(values.d() >= 1 || values.d() == 0) || std::isinf(values.d())) {
    return refuse("d is out of range (got ", values.d(), ", want finite, >= 1, or 0 for 1)");
  }
  return absl::OkStatus();
}

}  // namespace

const std::vector<OptimizerKindRow>& OptimizerKinds() {
  // Never destroyed: it may be read while the process ends.
  static const auto* const kinds = new std::vector<OptimizerKindRow>{
      // kind, in_daemon, states, momentum_state, counts_steps, hyperparameters
      {v1::OPTIMIZER_KIND_NONE, false, {}, nullptr, false, {}},
      // Its states are OptimizerConfig.trainer_states, whose names only the trainers know.
      {v1::OPTIMIZER_KIND_TRAINER, false, {}, nullptr, false, {}},
      {v1::OPTIMIZER_KIND_ADAMW,
       true,
       {"exp_avg", "exp_avg_sq"},
       nullptr,
       true,
       {kLr, kWeightDecay, kBeta1, kBeta2, kEps}},
      {v1::OPTIMIZER_KIND_ADAM,
       true,
       {"exp_avg", "exp_avg_sq"},
       nullptr,
       true,
       {kLr, kWeightDecay, kBeta1, kBeta2, kEps}},
      {v1::OPTIMIZER_KIND_SGD, true, {}, "momentum_buffer", false, {kLr, kWeightDecay, kMomentum}},
      {v1::OPTIMIZER_KIND_ADAGRAD, true, {"sum"}, nullptr, true, {kLr, kWeightDecay, kEps, kLrDecay, kInitial}},
      {v1::OPTIMIZER_KIND_RMSPROP,
       true,
       {"square_avg"},
       "momentum_buffer",
       true,
       {kLr, kWeightDecay, kEps, kAlpha, kMomentum}},
      {v1::OPTIMIZER_KIND_CENTERED_RMSPROP,
       true,
       {"square_avg", "grad_avg"},
       "momentum_buffer",
       true,
       {kLr, kWeightDecay, kEps, kAlpha, kMomentum}},
      {v1::OPTIMIZER_KIND_LION, true, {"exp_avg"}, nullptr, false, {kLr, kWeightDecay, kBeta1, kBeta2}},
      {v1::OPTIMIZER_KIND_ADAM_AMSGRAD,
       true,
       {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
       nullptr,
       true,
       {kLr, kWeightDecay, kBeta1, kBeta2, kEps}},
      {v1::OPTIMIZER_KIND_ADAMW_AMSGRAD,
       true,
       {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
       nullptr,
       true,
       {kLr, kWeightDecay, kBeta1, kBeta2, kEps}},
      // Its buffer is no choice: without momentum torch keeps one, too.
      {v1::OPTIMIZER_KIND_MUON, true, {"momentum_buffer"}, nullptr, false, {kLr, kWeightDecay, kEps, kMomentum}},
      // A parameter of less than two dimensions has torch's "variance" as the first, and no second.
      {v1::OPTIMIZER_KIND_ADAFACTOR, true, {"row_var", "col_var"}, nullptr, true, {kLr, kWeightDecay, kEps2}},
  };
  return *kinds;
}

const OptimizerKindRow* FindOptimizerKind(v1::OptimizerKind kind) {
  for (const OptimizerKindRow& row : OptimizerKinds()) {
    if (row.kind == kind) {
      return &row;
    }
  }
  return nullptr;
}

std::string OptimizerKindText(v1::OptimizerKind kind) {
  const std::string& name = v1::OptimizerKind_Name(kind);
  return name.empty() ? absl::StrCat(static_cast<int>(kind)) : name;
}

int OptimizerGroups(const v1::OptimizerConfig& optimizer) {
  const OptimizerKindRow* const row = FindOptimizerKind(optimizer.kind());
  return row != nullptr && row->in_daemon ? optimizer.groups_size() + 1 : 0;
}

bool HasSeveralOptimizers(const v1::OptimizerConfig& optimizer) {
  return optimizer.groups_size() > 0 && optimizer.groups(0).kind() != v1::OPTIMIZER_KIND_UNSPECIFIED;
}

v1::OptimizerKind OptimizerKindOf(const v1::OptimizerConfig& optimizer, int group) {
  const bool own = group > 0 && HasSeveralOptimizers(optimizer);
  return own ? optimizer.groups(group - 1).kind() : optimizer.kind();
}

bool HasMomentum(const v1::OptimizerConfig& optimizer, int group) {
  return group > 0 && HasSeveralOptimizers(optimizer) ? optimizer.groups(group - 1).momentum() : optimizer.momentum();
}

int OptimizerStatesOf(const v1::OptimizerConfig& optimizer, int group) {
  if (optimizer.kind() == v1::OPTIMIZER_KIND_TRAINER) {
    return optimizer.trainer_states();
  }
  if (group == 0 && HasSeveralOptimizers(optimizer)) {
    return 0;
  }
  const OptimizerKindRow* const row = FindOptimizerKind(OptimizerKindOf(optimizer, group));
  return row == nullptr ? 0 : static_cast<int>(row->states.size()) + (HasMomentum(optimizer, group) ? 1 : 0);
}

absl::Status CheckHyperParameters(const v1::OptimizerConfig& optimizer, int group, const v1::HyperParameters& values) {
  if (group == 0 && HasSeveralOptimizers(optimizer)) {
    return absl::OkStatus();
  }
  const v1::OptimizerKind kind = OptimizerKindOf(optimizer, group);
  const OptimizerKindRow* const row = FindOptimizerKind(kind);
  if (row == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("optimizer group ", group, ": no such optimizer kind (got ", OptimizerKindText(kind), ")"));
  }
  for (const HyperParameterRange& range : row->hyperparameters) {
    const double value = (values.*range.get)();
    if (!(value >= 0 && value < (range.below_one ? 1 : std::numeric_limits<double>::infinity()))) {
      return absl::InvalidArgumentError(absl::StrCat("optimizer group ", group, ": ", range.name,
                                                     " is out of range (got ", value, ", want ",
                                                     range.below_one ? "[0, 1)" : "finite, >= 0", ")"));
    }
  }
  if (kind == v1::OPTIMIZER_KIND_MUON) return CheckMuon(group, values);
  if (kind == v1::OPTIMIZER_KIND_ADAFACTOR) return CheckAdafactor(group, values);
  return row->momentum_state == nullptr ? absl::OkStatus() : CheckMomentum(optimizer, group, values);
}

}  // namespace shardd
