// A unit in backward: its parameters unsharded again, its gradients into the daemon's slots, and the end.

#include <algorithm>
#include <utility>

#include "client/python/extension/errors.h"
#include "client/python/extension/nodes.h"
#include "client/python/extension/tensors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {
void Unit::PreBackward(uint64_t generation) {
  const py::gil_scoped_acquire gil;
  CheckInGraph(generation);
  state_training_ = Training::kPreBackward;
  engine_->QueueFinal();
  engine_->set_whole_backward();
  if (group_training_ == Training::kPreBackward) {
    return;
  }
  if (unsharded_ && !shards_shown_) {
    CheckKept();
  }
  group_training_ = Training::kPreBackward;
  Unshard();
}

void Unit::BackwardReachedInputs(uint64_t generation) {
  {
    const py::gil_scoped_acquire gil;
    CheckInGraph(generation);
    engine_->QueuePartialFinal();
  }
  PostBackward();
}

void Unit::PostBackward() {
  const py::gil_scoped_acquire gil;
  group_training_ = Training::kPostBackward;
  backward_number_ = engine_->NextBackward();
  for (const Group& group : groups_) {
    Check(lives().Submit(group.id));
  }
  if (reshard_after_backward) {
    ToSharded();
  }
}

const Unit::Group& Unit::group_of(int id) const {
  return *std::find_if(groups_.begin(), groups_.end(), [id](const Group& group) { return group.id == id; });
}

bool Unit::ran_forward() const { return !groups_.empty() && lives().ran_forward(groups_.front().id); }

bool Unit::in_slot(const ManagedParam& param) const {
  return lives().HasGradient(groups_[param.unit_group].id, param.index_in_group);
}

void Unit::OnGradient(size_t index, const at::Tensor& gradient) {
  ManagedParam& param = *params_[index];
  const int group = groups_[param.unit_group].id;
  (void)engine_->job();  // in the order of the stream that this gradient is written in
  if (KeepsOwnGradient(param)) {
    param.AddOwnGradient(gradient);
    return;
  }
  Check(lives().PrepareGradients(group));
  const bool adds = in_slot(param);
  const bool fresh = !adds && param.BeginGradient(engine_->steps());
  param.WriteGradient(gradient, gradient_scale, /*add=*/adds);
  if (!adds && !param.contributed) {
    param.WriteOwnGradient(gradient_scale);
  }
  lives().MarkGradient(group, param.index_in_group, fresh);
}

void Unit::BeforeSubmit(int id) {
  for (const size_t index : group_of(id).params) {
    if (params_[index]->trainable) {
      params_[index]->shard().LeaveGradientToJob(engine_->steps(), shows_gradients());
    }
  }
}

void Unit::AfterSubmit(int id) {
  for (const size_t index : group_of(id).params) {
    ManagedParam& param = *params_[index];
    if (in_slot(param)) {
      param.pending = param.in_job = param.contributed = true;
      param.left_in_job = false;
    }
  }
}

void Unit::CompleteFlatGradients() {
  const auto has_gradient = [this](const ManagedParam& param) { return param.contributed || in_slot(param); };
  if (completes_gradients &&
      std::any_of(params_.begin(), params_.end(), [&](const auto& param) { return has_gradient(*param); })) {
    for (size_t index = 0; index < params_.size(); ++index) {
      ManagedParam& param = *params_[index];
      if (param.trainable && param.requires_grad() && !has_gradient(param)) {
        OnGradient(index, param.ZeroGradient());
      }
    }
  }
  if (shards_.size() == params_.size()) {
    return;
  }
  for (const auto& shard : shards_) {
    const bool any = std::any_of(params_.begin(), params_.end(), [&](const auto& param) {
      return param->shared_shard() == shard && has_gradient(*param);
    });
    for (size_t index = 0; any && index < params_.size(); ++index) {
      ManagedParam& param = *params_[index];
      if (param.shared_shard() == shard && !has_gradient(param)) {
        OnGradient(index, param.ZeroGradient());
      }
    }
  }
}

void Unit::SubmitOwnGradients() {
  for (size_t index = 0; ran_forward() && index < params_.size(); ++index) {
    ManagedParam& param = *params_[index];
    if (!param.contributed && !in_slot(param) && !KeepsOwnGradient(param) && param.has_own_gradient()) {
      OnGradient(index, param.ZeroGradient());
    }
  }
}

void Unit::SubmitRest() {
  SubmitOwnGradients();
  CompleteFlatGradients();
  for (const Group& group : groups_) {
    if (!group.trainable) {
      continue;
    }
    if (reduce_scatter_unused_params) {
      for (const size_t index : group.params) {
        ManagedParam& param = *params_[index];
        if (param.trainable && param.requires_grad() && !param.contributed && !in_slot(param)) {
          OnGradient(index, param.ZeroGradient());
        }
      }
    }
    Check(lives().SubmitOwed(group.id));
  }
}

void Unit::EndBackward() {
  for (const Group& group : groups_) {
    lives().EndForward(group.id);
  }
  EndGroups();
}

void Unit::EndPartialBackward() {
  if (group_training_ == Training::kPostBackward) {
    EndGroups();
  }
}

void Unit::EndGroups() {
  for (const Group& group : groups_) {
    lives().EndBackward(group.id, /*stays=*/unsharded_);
  }
  for (const auto& param : params_) {
    if (std::exchange(param->contributed, false)) {
      param->shard().DropOwnGradient();
    }
  }
  set_idle();
}

void Unit::AbandonBackward() {
  for (const Group& group : groups_) {
    lives().AbandonBackward(group.id);
  }
  for (const auto& param : params_) {
    // The job may have what other ranks needed of it, so `in_job` stays: a step without `.grad` then drops it.
    param->pending = param->pending && !param->contributed;
    param->contributed = false;  // its own gradient stays
  }
  EndBackward();
  ShowOwnGradients();
}

}  // namespace shardd::python
