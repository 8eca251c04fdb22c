// The parameters of a unit, and how the gradients that the job has added up become those that users see, and the other
// way.

#include "client/python/extension/unit_gradients.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/errors.h"

namespace shardd::python {

void UnitGradients::Bind(Engine& engine) {
  engine_ = &engine;
  groups_.clear();
  for (const int id : life_.groups()) {
    groups_.push_back({id, engine.job().group(id).info().trainable != 0, {}});
  }
}

void UnitGradients::AddParam(std::shared_ptr<ManagedParam> param) {
  groups_[param->unit_group].params.push_back(params_.size());
  if (std::find(shards_.begin(), shards_.end(), param->shared_shard()) == shards_.end()) {
    shards_.push_back(param->shared_shard());
  }
  params_.push_back(std::move(param));
}

void UnitGradients::Unbind() {
  engine_ = nullptr;
  groups_.clear();
  params_.clear();
  shards_.clear();
}

std::shared_ptr<ManagedParam> UnitGradients::FindParam(int daemon_param) const {
  const auto found = std::find_if(params_.begin(), params_.end(),
                                  [&](const auto& param) { return param->daemon_param == daemon_param; });
  return found == params_.end() ? nullptr : *found;
}

HeldShard* UnitGradients::FindShard(int daemon_param) const {
  const auto found = std::find_if(shards_.begin(), shards_.end(),
                                  [&](const auto& shard) { return shard->daemon_param == daemon_param; });
  return found == shards_.end() ? nullptr : found->get();
}

bool UnitGradients::HasUnfrozen() const {
  return std::any_of(params_.begin(), params_.end(),
                     [](const auto& param) { return !param->trainable && param->requires_grad(); });
}

bool UnitGradients::HasPending() const {
  return options_.shows_gradients() &&
         std::any_of(params_.begin(), params_.end(), [](const auto& param) { return param->pending; });
}

bool UnitGradients::MayLack() const {
  return options_.shows_gradients() && !options_.replaces_reduction &&
         std::any_of(params_.begin(), params_.end(),
                     [](const auto& param) { return param->trainable && param->requires_grad(); });
}

void UnitGradients::TakeFromOthers(const std::vector<int32_t>& given) {
  for (const auto& param : params_) {
    if (param->trainable && param->requires_grad() &&
        std::binary_search(given.begin(), given.end(), param->daemon_param)) {
      param->pending = param->in_job = true;
      param->left_in_job = false;
    }
  }
}

void UnitGradients::Show() {
  if (!options_.shows_gradients()) {
    return;
  }
  for (const auto& param : params_) {
    param->shard().to_show = param->shard().to_show || param->pending;
    param->pending = false;
  }
  if (has_hook()) {
    CallHook();
  }
  for (const auto& shard : shards_) {
    if (std::exchange(shard->to_show, false)) {
      shard->ShowGradient(engine_->steps());
    } else {
      shard->TakeGradientFromJob();  // other ranks' alone
    }
  }
}

void UnitGradients::CallHook() {
  py::list gradients;
  for (const auto& shard : shards_) {
    if (shard->to_show) {
      gradients.append(py::make_tuple(shard->daemon_param,
                                      py::reinterpret_steal<py::object>(THPVariable_Wrap(shard->gradient_shard()))));
    }
  }
  if (!gradients.empty()) {
    hook_(gradients);
  }
}

void UnitGradients::Replace() {
  py::list own;
  for (const auto& shard : shards_) {
    if (at::Tensor gradient = options_.reduce_grads ? shard->TakeOwnGradient() : at::Tensor(); gradient.defined()) {
      own.append(py::make_tuple(shard->daemon_param,
                                py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(gradient)))));
    }
  }
  if (own.empty()) {
    return;
  }
  for (const py::handle given : py::list(hook_(own))) {
    const auto pair = given.cast<py::tuple>();
    FindShard(pair[0].cast<int>())->GiveGradient(THPVariable_Unpack(py::object(pair[1]).ptr()));
  }
}

void UnitGradients::CheckShown() const {
  for (const auto& param : params_) {
    if (param->pending || param->has_own_gradient()) {
      Check(
          Status(Code::kFailedPrecondition,
                 "unfreeze: the gradient of \"" + param->fqn +
                     "\" is not synchronised; unfreeze after a backward with set_requires_gradient_sync(True) and, on "
                     "a 2-D mesh, set_requires_all_reduce(True)"));
    }
  }
}

void UnitGradients::Settle(For what) {
  const bool stepping = what != For::kOther;
  for (const auto& param : params_) {
    if (stepping && param->shard().updated && param->has_own_gradient()) {
      RaiseNotSynchronised(param->fqn);
    }
  }
  for (const auto& shard : shards_) {
    if (!shard->trainable || shard->shows_no_gradient() || (what == For::kStepOfSeveral && !shard->updated)) {
      continue;
    }
    if (shard->is_left_to_job()) {
      {
        const NoGil no_gil;
        Check(engine_->job().WaitGradients());
      }
      engine_->attached().AwaitHostState();
    }
    const HeldShard::Shown shown = shard->SettleGradient(engine_->steps(), stepping);
    for (const auto& param : params_) {
      if (param->shared_shard() != shard) {
        continue;
      }
      const ManagedParam::Presence presence = param->SettleGradient(shown, stepping);
      if (presence != ManagedParam::Presence::kAsIs) {
        const NoGil no_gil;
        Check(Status::Take(shardd_set_gradient_presence(engine_->job().c_job(), param->daemon_param,
                                                        presence == ManagedParam::Presence::kGiven ? 1 : 0)));
      }
    }
  }
}

void UnitGradients::ShowOwn() {
  for (const auto& param : params_) {
    param->ShowOwnGradient();
  }
}

void UnitGradients::HideOwn() {
  for (const auto& param : params_) {
    param->HideOwnGradient();
  }
}

void UnitGradients::EndStep(float* counts, bool in_trainers) {
  for (const auto& param : params_) {
    if (counts != nullptr && param->in_job && param->shard().updated) {
      counts[param->daemon_param] += 1;
    }
    param->left_in_job = in_trainers && param->in_job;
    param->in_job = false;
  }
  for (size_t i = 0; !in_trainers && i < shards_.size(); ++i) {
    shards_[i]->ForgetInJob();
  }
}

void UnitGradients::EndPart(float* counts, int64_t steps) {
  for (const auto& param : params_) {
    if (!param->shard().updated) {
      continue;
    }
    if (counts != nullptr && param->in_job) {
      counts[param->daemon_param] += 1;
    }
    param->in_job = param->left_in_job = false;
  }
  for (const auto& shard : shards_) {
    if (shard->updated) {
      shard->ForgetInJob();
    } else {
      shard->StayCurrent(steps);
    }
  }
}

void UnitGradients::AddUnseen(std::vector<int>* params) const {
  for (const auto& param : params_) {
    if (param->trainable && !param->pending && param->shared_shard()->GradientIsUnseen()) {
      params->push_back(param->daemon_param);
    }
  }
}

void UnitGradients::LoadMemory() {
  shardd_job* job = engine_->job().c_job();
  for (const auto& param : params_) {
    param->SetGradientSlot(shardd_gradient_data(job, param->daemon_param));
  }
  for (const auto& shard : shards_) {
    const char* stored = static_cast<const char*>(shardd_stored_parameter_data(job, shard->daemon_param));
    shard->PointShard(stored + shard->first_element * shard->element_bytes());
    if (auto* gradient = static_cast<float*>(shardd_gradient_shard_data(job, shard->daemon_param));
        gradient != nullptr) {
      shard->SetGradientMemory(gradient + shard->first_element);
    }
    for (size_t state = 0; state < shard->state_count(); ++state) {
      auto* of_param =
          static_cast<float*>(shardd_optimizer_state_data(job, shard->daemon_param, static_cast<int32_t>(state)));
      shard->PointState(state, of_param);
    }
  }
}

void UnitGradients::ForgetMemory(bool keeps_gradients) {
  for (const auto& param : params_) {
    if (!keeps_gradients) {
      param->DropOwnGradient();
    }
    param->Forget();
  }
  for (const auto& shard : shards_) {
    keeps_gradients ? shard->LeaveGradient() : shard->ForgetGradient();
  }
}

void UnitGradients::CopyShardsOut() {
  for (const auto& shard : shards_) {
    shard->CopyShardOut();
  }
}

}  // namespace shardd::python
