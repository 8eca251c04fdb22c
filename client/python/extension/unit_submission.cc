// From autograd's gradients into the daemon's slots, and what a backward owes at its end.

#include <algorithm>
#include <utility>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/errors.h"
#include "client/python/extension/unit_gradients.h"

namespace shardd::python {

fsdp::GroupLives& UnitGradients::lives() const { return engine_->groups(); }

const UnitGradients::Group& UnitGradients::group_of(int id) const {
  return *std::find_if(groups_.begin(), groups_.end(), [id](const Group& group) { return group.id == id; });
}

bool UnitGradients::in_slot(const ManagedParam& param) const {
  return lives().HasGradient(groups_[param.unit_group].id, param.index_in_group);
}

void UnitGradients::OnGradient(size_t index, const at::Tensor& of_autograd) {
  ManagedParam& param = *params_[index];
  const at::Tensor local = param.LocalGradient(of_autograd);  // with ranks beside this one, whatever it contributes
  const at::Tensor gradient = options_.contributes ? local : param.ZeroGradient();
  const int group = groups_[param.unit_group].id;
  (void)engine_->job();  // in the order of the stream that this gradient is written in
  if (KeepsOwn(param)) {
    param.AddOwnGradient(gradient);
    return;
  }
  Check(lives().PrepareGradients(group));
  const bool adds = in_slot(param);
  const bool fresh = !adds && param.BeginGradient(engine_->steps(), /*alone=*/has_hook());
  const double scale = options_.gradient_scale * (options_.scales_by_mesh ? param.mesh_scale : 1);
  param.WriteGradient(gradient, scale, /*add=*/adds);
  if (!adds && !param.contributed) {
    param.WriteOwnGradient(scale);
  }
  lives().MarkGradient(group, param.index_in_group, fresh);
}

void UnitGradients::BeforeSubmit(int id) {
  for (const size_t index : group_of(id).params) {
    if (params_[index]->trainable) {
      params_[index]->shard().LeaveGradientToJob(engine_->steps(), options_.shows_gradients());
      LeaveToOthers(*params_[index]);
    }
  }
}

void UnitGradients::AfterSubmit(int id) {
  for (const size_t index : group_of(id).params) {
    ManagedParam& param = *params_[index];
    if (in_slot(param)) {
      param.pending = param.in_job = param.contributed = true;
      param.left_in_job = false;
    }
  }
}

void UnitGradients::SubmitOwn() {
  for (size_t index = 0; life_.ran_forward() && index < params_.size(); ++index) {
    ManagedParam& param = *params_[index];
    if (!param.contributed && !in_slot(param) && !KeepsOwn(param) && param.has_own_gradient()) {
      OnGradient(index, param.ZeroGradient());
    }
  }
}

void UnitGradients::CompleteFlat() {
  const auto has_gradient = [this](const ManagedParam& param) { return param.contributed || in_slot(param); };
  if (options_.completes_gradients &&
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

void UnitGradients::SubmitRest() {
  SubmitOwn();
  CompleteFlat();
  for (const Group& group : groups_) {
    if (!group.trainable) {
      continue;
    }
    if (options_.reduce_scatter_unused_params) {
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

void UnitGradients::SayDropped() {
  for (const auto& param : params_) {
    HeldShard& shard = param->shard();
    if (!param->in_job || param->pending || !shard.is_plain() || shard.shows_no_gradient() ||
        !shard.HasGradientElsewhere()) {
      continue;
    }
    param->in_job = param->left_in_job = false;
    const NoGil no_gil;
    Check(Status::Take(shardd_set_gradient_presence(engine_->job().c_job(), param->daemon_param, 0)));
  }
}

void UnitGradients::LeaveToOthers(ManagedParam& param) {
  if (param.trainable && !param.contributed && !param.pending && !in_slot(param)) {
    param.shard().LeaveGradientToOthers(engine_->steps(), /*alone=*/has_hook());
  }
}

void UnitGradients::LeaveToOthers() {
  for (const auto& param : params_) {
    LeaveToOthers(*param);
  }
}

void UnitGradients::EndBackward() {
  for (const auto& param : params_) {
    if (std::exchange(param->contributed, false)) {
      param->shard().DropOwnGradient();
    }
  }
}

void UnitGradients::AbandonBackward() {
  for (const auto& param : params_) {
    // The job may have what other ranks needed of it, so `in_job` stays: a step without `.grad` then drops it.
    param->pending = param->pending && !param->contributed;
    param->contributed = false;  // its own gradient stays
  }
  ShowOwn();
}

}  // namespace shardd::python
