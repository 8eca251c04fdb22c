// The module and its job: which tensor is which parameter, first values, storages, and what a new attachment or the end
// of the job does to them.

#include <algorithm>
#include <utility>

#include "client/torch/autograd_nodes.h"
#include "client/torch/sharded_state.h"

namespace shardd::internal {
namespace {

// Deaths while initial values are being given; each is another process that died, so this ends.
constexpr int kMaxInitialAttempts = 100;

at::ScalarType ScalarTypeOf(int32_t dtype) {
  switch (dtype) {
    case SHARDD_BFLOAT16:
      return at::kBFloat16;
    case SHARDD_FLOAT16:
      return at::kHalf;
    case SHARDD_FLOAT64:
      return at::kDouble;
    case SHARDD_INT64:
      return at::kLong;
    case SHARDD_INT32:
      return at::kInt;
    case SHARDD_INT16:
      return at::kShort;
    case SHARDD_INT8:
      return at::kChar;
    case SHARDD_UINT8:
      return at::kByte;
    case SHARDD_BOOL:
      return at::kBool;
    default:
      return at::kFloat;
  }
}

}  // namespace

Status ShardedState::Bind(const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  const shardd_job_info info = job_->info();
  params_.resize(static_cast<size_t>(info.param_count));
  for (int32_t i = 0; i < info.param_count; ++i) {
    const shardd_param_info plan = job_->parameter_info(i);
    ParamState& param = params_[static_cast<size_t>(i)];
    param.fqn = plan.fqn;
    param.group = plan.group;
    param.index_in_group = plan.index_in_group;
    param.requires_grad = plan.requires_grad != 0;
    param.stored_dtype = ScalarTypeOf(plan.dtype);
    param.unsharded_dtype = ScalarTypeOf(plan.unsharded_dtype);
  }
  for (int32_t g = 0; g < info.group_count; ++g) {
    const shardd_group_info plan = job_->group(g).info();
    GroupState group;
    group.name = plan.name;
    group.params.assign(plan.params, plan.params + plan.param_count);
    group.also_unshards.assign(plan.also_unshards, plan.also_unshards + plan.also_unshard_count);
    group.reshard_after_forward = plan.reshard_after_forward != 0;
    group.trainable = plan.trainable != 0;
    groups_.push_back(std::move(group));
  }
  for (const auto& entry : tensors) {
    const at::Tensor& tensor = entry.second;
    const int32_t index = job_->FindParameter(entry.first);
    if (index < 0) {
      continue;
    }
    auto& known = params_[static_cast<size_t>(index)].tensors;
    if (std::none_of(known.begin(), known.end(), [&](const at::Tensor& other) { return other.is_same(tensor); })) {
      known.push_back(tensor);
    }
  }
  for (const ParamState& param : params_) {
    if (param.tensors.empty()) {
      return Status(Code::kInternal, "bind parameter \"" + param.fqn + "\": planned but not in the module");
    }
  }
  LoadGradientSlots();
  return Status();
}

Status ShardedState::GiveInitialValues(int32_t writer) {
  Status status;
  for (int attempt = 0; attempt < kMaxInitialAttempts; ++attempt) {
    const shardd_job_info info = job_->info();
    if (info.version > 0) {
      return Status();
    }
    status = Status();
    if (info.rank == writer) {
      for (size_t i = 0; i < params_.size() && status.ok(); ++i) {
        const at::Tensor values = params_[i].tensors[0].detach().contiguous();
        status = job_->WriteParameter(static_cast<int32_t>(i), values.const_data_ptr(), 0, values.numel());
      }
    }
    if (status.ok()) {
      status = job_->CommitParameters();
    }
    if (status.ok()) {
      return status;
    }
    if (!status.aborted()) {
      return status;
    }
    Status attached = Reattach();
    if (!attached.ok()) {
      return attached;
    }
  }
  return status;
}

void ShardedState::Adopt() {
  for (size_t i = 0; i < params_.size(); ++i) {
    ParamState& param = params_[i];
    const std::string& group = group_at(param.group).name;
    param.storage = std::make_unique<ParameterStorage>(
        param.tensors[0].sizes(), param.unsharded_dtype,
        "use of parameter \"" + param.fqn + "\": parameter group \"" + group +
            "\" is resharded; it can be read inside ShardedModule::Run of its module and in the backward of that");
    for (at::Tensor& tensor : param.tensors) {
      param.storage->Adopt(tensor);
      if (param.requires_grad) {
        param.accumulators.push_back(InstallGradientAccumulator(shared_from_this(), static_cast<int32_t>(i), tensor));
      }
    }
  }
}

void ShardedState::ForgetMemory() {
  iteration_.EndGraphs();
  order_.clear();
  for (size_t g = 0; g < groups_.size(); ++g) {
    GroupState& group = groups_[g];
    if (group.readers > 0) {
      for (const int32_t p : group.params) {
        params_[static_cast<size_t>(p)].storage->Clear();
      }
    }
    group.readers = group.awaiting_end = 0;
    ++group.hold_stamp;
    lives_.Forget(static_cast<int32_t>(g));
  }
  for (ParamState& param : params_) {
    param.gradient = at::Tensor();
  }
}

Status ShardedState::Reattach() {
  ForgetMemory();
  Status status = job_->Reattach();
  if (status.ok()) {
    LoadGradientSlots();
  }
  return status;
}

Status ShardedState::AbandonBackward() {
  ForgetMemory();
  LoadGradientSlots();
  return job_->AbandonBackward();
}

std::unique_ptr<Job> ShardedState::TakeJob() {
  ForgetMemory();
  return std::move(job_);
}

}  // namespace shardd::internal
