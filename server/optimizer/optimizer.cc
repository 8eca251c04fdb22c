#include "server/optimizer/optimizer.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/device/device_op.h"

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
    }
  }
  char* param;
  char* cast = nullptr;  // nullptr: there is no cast copy
  float* gradient = nullptr;
  float* state0 = nullptr;
  float* state1 = nullptr;  // only if the plan has two states
};

// Copies copy 0 at `first` to all others.
void AddCopies(int copies, int64_t stride_bytes, char* first, int64_t size_bytes, std::vector<DeviceOp>* ops) {
  for (int copy = 1; copy < copies; ++copy) {
    ops->emplace_back(CopyOp{first, first + copy * stride_bytes, size_bytes});
  }
}

bool IsAdam(v1::OptimizerKind kind) { return kind == v1::OPTIMIZER_KIND_ADAMW || kind == v1::OPTIMIZER_KIND_ADAM; }

DeviceOp MakeAdamWOp(const FlatParamPlan& flat, const Addresses& at, const v1::HyperParameters& h, double clip_factor,
                     int64_t step, int64_t numel, bool coupled_decay) {
  AdamWOp op;
  op.params = {h.lr(), h.beta1(), h.beta2(), h.eps(), h.weight_decay(), step, clip_factor, coupled_decay};
  op.p = at.param;
  op.param_dtype = flat.dtype;
  op.g = at.gradient;
  op.m = at.state0;
  op.v = at.state1;
  op.cast_dst = at.cast;
  op.cast_dtype = flat.unsharded_dtype;
  op.numel = numel;
  return op;
}

DeviceOp MakeSgdOp(const FlatParamPlan& flat, const Addresses& at, const v1::HyperParameters& h, double clip_factor,
                   int64_t step, int64_t numel) {
  SgdOp op;
  op.params = {h.lr(), h.momentum(), h.dampening(), h.weight_decay(), h.nesterov(), step == 1, clip_factor};
  op.p = at.param;
  op.param_dtype = flat.dtype;
  op.g = at.gradient;
  op.buf = h.momentum() == 0 ? nullptr : at.state0;
  op.cast_dst = at.cast;
  op.cast_dtype = flat.unsharded_dtype;
  op.numel = numel;
  return op;
}

// INVALID_ARGUMENT: `value` is outside [low, high) or not finite.
absl::Status CheckRange(int group, absl::string_view field, double value, double high, absl::string_view want) {
  if (value >= 0 && value < high) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("step: optimizer group ", group, ": ", field, " is out of range (got ",
                                                 value, ", want ", want, ")"));
}

absl::Status CheckAdamW(int group, const v1::HyperParameters& h) {
  if (absl::Status status = CheckRange(group, "beta1", h.beta1(), 1, "[0, 1)"); !status.ok()) return status;
  if (absl::Status status = CheckRange(group, "beta2", h.beta2(), 1, "[0, 1)"); !status.ok()) return status;
  return CheckRange(group, "eps", h.eps(), INFINITY, "finite, >= 0");
}

absl::Status CheckSgd(int group, const v1::HyperParameters& h, bool has_buffer) {
  if (absl::Status status = CheckRange(group, "momentum", h.momentum(), INFINITY, "finite, >= 0"); !status.ok()) {
    return status;
  }
  const auto refuse = [group](const auto&... fact) {
    return absl::InvalidArgumentError(absl::StrCat("step: optimizer group ", group, ": ", fact...));
  };
  if (!std::isfinite(h.dampening())) return refuse("dampening is not finite (got ", h.dampening(), ")");
  if (h.nesterov() && (h.momentum() == 0 || h.dampening() != 0)) {
    return refuse("nesterov needs momentum and no dampening (got momentum ", h.momentum(), ", dampening ",
                  h.dampening(), ")");
  }
  if (h.momentum() > 0 && !has_buffer) {
    return refuse("momentum without a planned buffer (got ", h.momentum(), ", want 0); set OptimizerConfig.momentum");
  }
  return absl::OkStatus();
}

}  // namespace

int OptimizerGroups(const ShardPlan& plan) {
  const v1::OptimizerConfig& optimizer = plan.config.optimizer();
  return IsAdam(optimizer.kind()) || optimizer.kind() == v1::OPTIMIZER_KIND_SGD ? optimizer.groups_size() + 1 : 0;
}

absl::Status CheckHyperParameters(const ShardPlan& plan, const v1::Step& step) {
  const v1::OptimizerConfig& optimizer = plan.config.optimizer();
  const bool adamw = IsAdam(optimizer.kind());
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
  for (int i = 0; i < step.groups_size(); ++i) {
    const v1::HyperParameters& h = step.groups(i);
    if (absl::Status status = CheckRange(i, "lr", h.lr(), INFINITY, "finite, >= 0"); !status.ok()) return status;
    if (absl::Status status = CheckRange(i, "weight_decay", h.weight_decay(), INFINITY, "finite, >= 0"); !status.ok()) {
      return status;
    }
    absl::Status status = adamw ? CheckAdamW(i, h) : CheckSgd(i, h, plan.optimizer_states > 0);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
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
  const v1::OptimizerKind kind = plan.config.optimizer().kind();
  if (!IsAdam(kind) && kind != v1::OPTIMIZER_KIND_SGD) return ops;
  for (size_t f = 0; f < plan.flat_params.size(); ++f) {
    const FlatParamPlan& flat = plan.flat_params[f];
    if (!IsTrained(flat)) continue;
    const std::vector<Range> ranges = WorkRanges(
        plan, static_cast<int>(f), rank, [&](int param) { return step.present[param]; },
        [&](int a, int b) {
          return plan.params[a].optimizer_group == plan.params[b].optimizer_group &&
                 step.step_counts[a] == step.step_counts[b];
        });
    for (const Range& range : ranges) {
      const v1::HyperParameters& h = step.groups[plan.params[range.param].optimizer_group];
      Addresses at(flat, slabs, range.offset);
      if (plan.config.pass_copies()) at.cast = nullptr;
      const int64_t number = step.step_counts[range.param] + 1;
      ops.push_back(IsAdam(kind) ? MakeAdamWOp(flat, at, h, step.clip_factor, number, range.numel,
                                               kind == v1::OPTIMIZER_KIND_ADAM)
                                 : MakeSgdOp(flat, at, h, step.clip_factor, number, range.numel));
      (IsAdam(kind) ? std::get<AdamWOp>(ops.back()).logged : std::get<SgdOp>(ops.back()).logged) = logged;
      logged.first += range.numel;
      // Replicas that edit their own shards see the new values like the others.
      AddCopies(plan.shard_copies, plan.shards_stride_bytes, at.param, range.numel * DTypeSizeBytes(flat.dtype), &ops);
    }
  }
  return ops;
}

std::vector<DeviceOp> CommitOps(const ShardPlan& plan, const SlabPointers& slabs, int rank) {
  std::vector<DeviceOp> ops;
  for (size_t f = 0; f < plan.flat_params.size(); ++f) {
    const FlatParamPlan& flat = plan.flat_params[f];
    const std::vector<Range> ranges = WorkRanges(
        plan, static_cast<int>(f), rank, [](int) { return true; }, [](int, int) { return true; });
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

std::vector<DeviceOp> KeepOps(const ShardPlan& plan, const SlabPointers& slabs, char* kept, bool back, int rank) {
  std::vector<DeviceOp> ops;
  const auto add = [&](char* slab, char* copy, int64_t size_bytes) {
    ops.emplace_back(CopyOp{back ? copy : slab, back ? slab : copy, size_bytes});
  };
  const bool keeps_states = plan.memory.kept_bytes > plan.memory.shards_bytes;
  for (size_t f = 0; f < plan.flat_params.size(); ++f) {
    const FlatParamPlan& flat = plan.flat_params[f];
    const std::vector<Range> ranges = WorkRanges(
        plan, static_cast<int>(f), rank, [](int) { return true; }, [](int, int) { return true; });
    for (const Range& range : ranges) {
      const Addresses at(flat, slabs, range.offset);
      for (int c = 0; c < plan.shard_copies; ++c) {
        char* const param = at.param + c * plan.shards_stride_bytes;
        add(param, kept + (param - slabs.shards), range.numel * DTypeSizeBytes(flat.dtype));
      }
      const int states = keeps_states && at.state0 != nullptr ? plan.optimizer_states : 0;
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
