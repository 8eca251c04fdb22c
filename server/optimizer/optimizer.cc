#include "server/optimizer/optimizer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/plan/optimizer_kinds.h"
#include "common/plan/whole_params.h"
#include "server/device/device_op.h"
#include "server/device/ops/rest_of_update.h"
#include "server/optimizer/whole_ops.h"

namespace shardd {
namespace {

bool IsTrained(const FlatParamPlan& flat) { return flat.requires_grad && flat.gradients_offset_bytes >= 0; }

// Elements [offset, offset + numel) of a flat parameter; `param` is one of its parameters, which are all treated alike.
struct Range {
  int param;
  int64_t offset;
  int64_t numel;
};

// `rank`'s work in `flat_param`, without parameters that `take` refuses; merges adjacent segments if `alike(a, b)`.
// Does not bridge alignment gaps: what a client leaves in them takes part in nothing.
template <typename Take, typename Alike>
std::vector<Range> WorkRanges(const ShardPlan& plan, int flat_param, int rank, Take&& take, Alike&& alike) {
  std::vector<Range> ranges;
  for (const Segment& segment : WorkSegments(plan, flat_param, rank)) {
    if (!take(segment.param)) continue;
    if (!ranges.empty() && ranges.back().offset + ranges.back().numel == segment.offset &&
        alike(ranges.back().param, segment.param)) {
      ranges.back().numel += segment.numel;
    } else {
      ranges.push_back({segment.param, segment.offset, segment.numel});
    }
  }
  return ranges;
}

// Addresses of a range of a flat parameter in each slab.
struct Addresses {
  Addresses(const FlatParamPlan& flat, const SlabPointers& slabs, int64_t offset)
      : param(slabs.shards + flat.shards_offset_bytes + offset * DTypeSizeBytes(flat.dtype)) {
    if (slabs.parameters != nullptr && flat.params_offset_bytes >= 0) {
      cast = slabs.parameters + flat.params_offset_bytes + offset * DTypeSizeBytes(flat.unsharded_dtype);
    }
    if (slabs.gradients != nullptr && flat.gradients_offset_bytes >= 0) {
      gradient = reinterpret_cast<float*>(slabs.gradients + flat.gradients_offset_bytes) + offset;
    }
    if (slabs.optimizer != nullptr && flat.optimizer_offset_bytes >= 0) {
      char* first = slabs.optimizer + flat.optimizer_offset_bytes;
      state0 = reinterpret_cast<float*>(first) + offset;
      state1 = reinterpret_cast<float*>(first + flat.StateStrideBytes()) + offset;
      state2 = reinterpret_cast<float*>(first + 2 * flat.StateStrideBytes()) + offset;
    }
  }
  char* param;
  char* cast = nullptr;  // nullptr: there is no cast copy
  float* gradient = nullptr;
  float* state0 = nullptr;
  float* state1 = nullptr;  // only if the flat parameter has two states, and three
  float* state2 = nullptr;
};

// Copies copy 0 at `first` to all others.
void AddCopies(int copies, int64_t stride_bytes, char* first, int64_t size_bytes, std::vector<DeviceOp>* ops) {
  for (int copy = 1; copy < copies; ++copy) {
    ops->emplace_back(CopyOp{first, first + copy * stride_bytes, size_bytes});
  }
}

// What updates of all kinds read and write; states are each kind's own.
template <typename Op>
void SetArrays(const FlatParamPlan& flat, const Addresses& at, int64_t numel, Op* op) {
  op->p = at.param;
  op->param_dtype = flat.dtype;
  op->g = at.gradient;
  op->cast_dst = at.cast;
  op->cast_dtype = flat.unsharded_dtype;
  op->numel = numel;
}

DeviceOp MakeAdamWOp(const FlatParamPlan& flat, const Addresses& at, const v1::HyperParameters& h, double clip_factor,
                     int64_t step, int64_t numel, bool coupled_decay) {
  AdamWOp op;
  op.params = {h.lr(), h.beta1(), h.beta2(), h.eps(), h.weight_decay(), step, clip_factor, coupled_decay};
  SetArrays(flat, at, numel, &op);
  op.m = at.state0;
  op.v = at.state1;
  return op;
}

DeviceOp MakeSgdOp(const FlatParamPlan& flat, const Addresses& at, const v1::HyperParameters& h, double clip_factor,
                   int64_t step, int64_t numel) {
  SgdOp op;
  op.params = {h.lr(), h.momentum(), h.dampening(), h.weight_decay(), h.nesterov(), step == 1, clip_factor};
  SetArrays(flat, at, numel, &op);
  op.buf = h.momentum() == 0 ? nullptr : at.state0;
  return op;
}

UpdateRule RuleOf(v1::OptimizerKind kind, const v1::HyperParameters& h) {
  switch (kind) {
    case v1::OPTIMIZER_KIND_ADAGRAD:
      return UpdateRule::kAdagrad;
    case v1::OPTIMIZER_KIND_CENTERED_RMSPROP:
      return h.momentum() > 0 ? UpdateRule::kRmspropCenteredMomentum : UpdateRule::kRmspropCentered;
    case v1::OPTIMIZER_KIND_LION:
      return UpdateRule::kLion;
    case v1::OPTIMIZER_KIND_ADAM_AMSGRAD:
    case v1::OPTIMIZER_KIND_ADAMW_AMSGRAD:
      return UpdateRule::kAmsgrad;
    default:  // OPTIMIZER_KIND_RMSPROP
      return h.momentum() > 0 ? UpdateRule::kRmspropMomentum : UpdateRule::kRmsprop;
  }
}

DeviceOp MakeRuleOp(v1::OptimizerKind kind, const FlatParamPlan& flat, const Addresses& at,
                    const v1::HyperParameters& h, double clip_factor, int64_t step, int64_t numel) {
  RuleOp op;
  op.params.rule = RuleOf(kind, h);
  op.params.lr = h.lr();
  op.params.weight_decay = h.weight_decay();
  op.params.eps = h.eps();
  op.params.beta1 = h.beta1();
  const bool has_betas = kind == v1::OPTIMIZER_KIND_LION || op.params.rule == UpdateRule::kAmsgrad;
  op.params.beta2 = has_betas ? h.beta2() : h.alpha();
  op.params.coupled_decay = kind == v1::OPTIMIZER_KIND_ADAM_AMSGRAD;
  op.params.momentum = h.momentum();
  op.params.lr_decay = h.lr_decay();
  op.params.initial = h.initial_accumulator_value();
  op.params.step = step;
  op.params.grad_scale = clip_factor;
  SetArrays(flat, at, numel, &op);
  op.a = at.state0;
  op.b = UpdateRuleStates(op.params.rule) >= 2 ? at.state1 : nullptr;
  op.c = UpdateRuleStates(op.params.rule) == 3 ? at.state2 : nullptr;
  return op;
}

// REQUIRES: a kind that the daemon steps.
DeviceOp MakeUpdateOp(v1::OptimizerKind kind, const FlatParamPlan& flat, const Addresses& at,
                      const v1::HyperParameters& h, double clip_factor, int64_t step, int64_t numel) {
  switch (kind) {
    case v1::OPTIMIZER_KIND_ADAMW:
    case v1::OPTIMIZER_KIND_ADAM:
      return MakeAdamWOp(flat, at, h, clip_factor, step, numel, kind == v1::OPTIMIZER_KIND_ADAM);
    case v1::OPTIMIZER_KIND_SGD:
      return MakeSgdOp(flat, at, h, clip_factor, step, numel);
    default:
      return MakeRuleOp(kind, flat, at, h, clip_factor, step, numel);
  }
}

}  // namespace

int OptimizerGroups(const ShardPlan& plan) { return OptimizerGroups(plan.config.optimizer()); }

absl::Status CheckHyperParameters(const ShardPlan& plan, const v1::Step& step) {
  const int want = OptimizerGroups(plan);
  if (step.groups_size() != want) {
    return absl::InvalidArgumentError(
        absl::StrCat("step: wrong number of optimizer groups (got ", step.groups_size(), ", want ", want, ")"));
  }
  if (!(step.max_grad_norm() >= 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("step: max_grad_norm is out of range (got ", step.max_grad_norm(), ", want >= 0)"));
  }
  if (step.norm_type() != 0 && !Norm::IsOrder(step.norm_type())) {
    return absl::InvalidArgumentError(absl::StrCat("step: norm_type is out of range (got ", step.norm_type(),
                                                   ", want above 0, infinity included, or 0 for 2)"));
  }
  if (!(step.loss_scale() >= 0) || std::isinf(step.loss_scale())) {
    return absl::InvalidArgumentError(
        absl::StrCat("step: loss_scale is out of range (got ", step.loss_scale(), ", want finite, >= 0)"));
  }
  if (!HasSeveralOptimizers(plan.config.optimizer()) && (step.left_groups_size() > 0 || step.part())) {
    return absl::InvalidArgumentError(absl::StrCat("step: one optimizer steps all of the model at once (got ",
                                                   step.part() ? "a part" : "groups that it leaves",
                                                   "); set OptimizerConfig.Group.kind"));
  }
  for (int i = 0; i < step.left_groups_size(); ++i) {
    const int before = i == 0 ? -1 : step.left_groups(i - 1);
    if (step.left_groups(i) <= before || step.left_groups(i) >= want) {
      return absl::InvalidArgumentError(absl::StrCat("step: left_groups are optimizer groups, ascending (got ",
                                                     step.left_groups(i), " behind ", before, ", want 0 to ", want - 1,
                                                     ")"));
    }
  }
  for (int i = 0; i < step.groups_size(); ++i) {
    const absl::Status status = CheckHyperParameters(plan.config.optimizer(), i, step.groups(i));
    if (!status.ok()) return absl::Status(status.code(), absl::StrCat("step: ", status.message()));
  }
  return absl::OkStatus();
}

bool Leaves(const v1::Step& step, int optimizer_group) {
  return std::binary_search(step.left_groups().begin(), step.left_groups().end(), optimizer_group);
}

std::vector<bool> UpdatedBy(const ShardPlan& plan, const v1::Step& step, const std::vector<bool>& present) {
  std::vector<bool> updated = present;
  if (!HasSeveralOptimizers(plan.config.optimizer())) return updated;
  for (size_t param = 0; param < updated.size(); ++param) {
    const int group = plan.params[param].optimizer_group;
    updated[param] = updated[param] && group > 0 && !Leaves(step, group);
  }
  return updated;
}

std::vector<DeviceOp> NormOps(const ShardPlan& plan, const SlabPointers& slabs, const std::vector<bool>& present,
                              int rank, Norm* result) {
  std::vector<DeviceOp> ops;
  for (size_t f = 0; f < plan.flat_params.size(); ++f) {
    const FlatParamPlan& flat = plan.flat_params[f];
    if (!IsTrained(flat)) continue;
    const std::vector<Range> ranges = WorkRanges(
        plan, static_cast<int>(f), rank, [&](int param) { return present[param]; }, [](int, int) { return true; });
    for (const Range& range : ranges) {
      ops.emplace_back(NormOp{Addresses(flat, slabs, range.offset).gradient, range.numel, result});
    }
  }
  return ops;
}

std::vector<DeviceOp> UpdateOps(const ShardPlan& plan, const SlabPointers& slabs, const DecidedStep& step, int rank,
                                Logged logged) {
  std::vector<DeviceOp> ops;
  if (OptimizerGroups(plan) == 0) return ops;
  for (size_t f = 0; f < plan.flat_params.size(); ++f) {
    const FlatParamPlan& flat = plan.flat_params[f];
    if (!IsTrained(flat)) continue;
    const std::vector<Range> ranges = WorkRanges(
        plan, static_cast<int>(f), rank, [&](int param) { return step.present[param] && !IsUpdatedWhole(plan, param); },
        [&](int a, int b) {
          return plan.params[a].optimizer_group == plan.params[b].optimizer_group &&
                 step.step_counts[a] == step.step_counts[b];
        });
    for (const Range& range : ranges) {
      const int group = plan.params[range.param].optimizer_group;
      const v1::HyperParameters& h = step.groups[group];
      const v1::OptimizerKind kind = OptimizerKindOf(plan.config.optimizer(), group);
      Addresses at(flat, slabs, range.offset);
      if (plan.config.pass_copies() || step.is_part) at.cast = nullptr;
      const int64_t number = step.step_counts[range.param] + 1;
      ops.push_back(MakeUpdateOp(kind, flat, at, h, step.clip_factor, number, range.numel));
      *MutableLoggedOf(&ops.back()) = logged;
      logged.first += range.numel;
      // Replicas that edit their own shards see the new values like the others.
      AddCopies(plan.shard_copies, plan.shards_stride_bytes, at.param, range.numel * DTypeSizeBytes(flat.dtype), &ops);
    }
  }
  for (DeviceOp& op : WholeOps(plan, slabs, step, rank, logged)) ops.push_back(std::move(op));
  return ops;
}

std::vector<DeviceOp> CommitOps(const ShardPlan& plan, const SlabPointers& slabs, int rank,
                                const std::vector<bool>& updated) {
  std::vector<DeviceOp> ops;
  for (size_t f = 0; f < plan.flat_params.size(); ++f) {
    const FlatParamPlan& flat = plan.flat_params[f];
    // The thread of another rank updates what is a whole matrix, and makes its copies behind that.
    const std::vector<Range> ranges = WorkRanges(
        plan, static_cast<int>(f), rank,
        [&](int param) { return updated.empty() || !updated[param] || !IsUpdatedWhole(plan, param); },
        [](int, int) { return true; });
    for (const Range& range : ranges) {
      const Addresses at(flat, slabs, range.offset);
      AddCopies(plan.shard_copies, plan.shards_stride_bytes, at.param, range.numel * DTypeSizeBytes(flat.dtype), &ops);
      if (at.cast == nullptr) continue;
      if (flat.unsharded_dtype == flat.dtype) {
        ops.emplace_back(CopyOp{at.param, at.cast, range.numel * DTypeSizeBytes(flat.dtype)});
      } else {
        ops.emplace_back(CastOp{at.param, flat.dtype, at.cast, flat.unsharded_dtype, range.numel});
      }
    }
  }
  return ops;
}

std::vector<DeviceOp> KeepOps(const ShardPlan& plan, const SlabPointers& slabs, char* kept, bool back, int rank,
                              KeptPart part) {
  std::vector<DeviceOp> ops;
  const auto add = [&](char* slab, char* copy, int64_t size_bytes) {
    ops.emplace_back(CopyOp{back ? copy : slab, back ? slab : copy, size_bytes});
  };
  const bool keeps_states = plan.memory.snapshot_bytes > plan.memory.shards_bytes;
  for (size_t f = 0; f < plan.flat_params.size(); ++f) {
    const FlatParamPlan& flat = plan.flat_params[f];
    const std::vector<Range> ranges = WorkRanges(
        plan, static_cast<int>(f), rank, [](int) { return true; }, [](int, int) { return true; });
    for (const Range& range : ranges) {
      const Addresses at(flat, slabs, range.offset);
      const bool in_copies = at.cast != nullptr && flat.unsharded_dtype == flat.dtype;
      const bool from_copies = part == KeptPart::kBehindPass;
      const bool adds_shards = part == KeptPart::kAll || (part != KeptPart::kStates && in_copies == from_copies);
      if (part == KeptPart::kStates && back) {
        ops.emplace_back(CopyOp{at.cast, at.param, range.numel * DTypeSizeBytes(flat.dtype)});
      }
      for (int c = 0; c < plan.shard_copies && adds_shards; ++c) {
        char* const param = at.param + c * plan.shards_stride_bytes;
        add(from_copies ? at.cast : param, kept + (param - slabs.shards), range.numel * DTypeSizeBytes(flat.dtype));
      }
      const bool adds_states = keeps_states && at.state0 != nullptr && part != KeptPart::kWithPass;
      const int states = adds_states ? flat.optimizer_states : 0;
      for (int c = 0; c < plan.optimizer_copies; ++c) {
        for (int s = 0; s < states; ++s) {
          char* const state =
              reinterpret_cast<char*>(at.state0) + c * plan.optimizer_stride_bytes + s * flat.StateStrideBytes();
          add(state, kept + plan.memory.shards_bytes + (state - slabs.optimizer),
              range.numel * static_cast<int64_t>(sizeof(float)));
        }
      }
    }
  }
  return ops;
}

std::vector<DeviceOp> GradientCopyOps(const ShardPlan& plan, const SlabPointers& slabs,
                                      const std::vector<bool>& written, int rank) {
  std::vector<DeviceOp> ops;
  if (plan.gradient_copies == 1 || std::none_of(written.begin(), written.end(), [](bool is) { return is; })) return ops;
  for (size_t f = 0; f < plan.flat_params.size(); ++f) {
    const FlatParamPlan& flat = plan.flat_params[f];
    if (!IsTrained(flat)) continue;
    const std::vector<Range> ranges = WorkRanges(
        plan, static_cast<int>(f), rank, [&](int param) { return written[param]; }, [](int, int) { return true; });
    for (const Range& range : ranges) {
      AddCopies(plan.gradient_copies, plan.gradients_stride_bytes,
                reinterpret_cast<char*>(Addresses(flat, slabs, range.offset).gradient),
                range.numel * static_cast<int64_t>(sizeof(float)), &ops);
    }
  }
  return ops;
}

double NormType(const v1::Step& step) { return step.norm_type() == 0 ? 2 : step.norm_type(); }

double ClipFactor(double norm, double max_norm) {
  if (max_norm == 0) return 1;
  const double factor = max_norm / (norm + 1e-6);
  // As torch.clamp(factor, max=1): a NaN norm gives a NaN factor.
  return factor > 1 ? 1 : factor;
}

}  // namespace shardd
