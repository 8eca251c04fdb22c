// How the gradients of a unit that the job has added up become those that users see, and the other way.

#include <algorithm>
#include <utility>

#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {

bool Unit::HasPendingGradients() const {
  return shows_gradients() &&
         std::any_of(params_.begin(), params_.end(), [](const auto& param) { return param->pending; });
}

void Unit::ShowGradients() {
  if (!shows_gradients()) {
    return;
  }
  for (const auto& param : params_) {
    param->shard().to_show = param->shard().to_show || param->pending;
    param->pending = false;
  }
  for (const auto& shard : shards_) {
    if (std::exchange(shard->to_show, false)) {
      shard->ShowGradient(engine_->steps());
    } else {
      shard->TakeGradientFromJob();  // other ranks' alone
    }
  }
}

void Unit::SettleGradients(bool stepping) {
  for (const auto& param : params_) {
    if (stepping && param->shard().updated && param->has_own_gradient()) {
      RaiseNotSynchronised(param->fqn);
    }
  }
  for (const auto& shard : shards_) {
    if (!shard->trainable || shard->shows_no_gradient()) {
      continue;
    }
    if (shard->is_left_to_job()) {
      {
        const NoGil no_gil;
        Check(engine_->job().WaitGradients());
      }
      engine_->AwaitHostState();
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

void Unit::ShowOwnGradients() {
  for (const auto& param : params_) {
    param->ShowOwnGradient();
  }
}

void Unit::HideOwnGradients() {
  for (const auto& param : params_) {
    param->HideOwnGradient();
  }
}

void Unit::EndStep(float* counts, bool in_trainers) {
  for (const auto& param : params_) {
    if (counts != nullptr && param->in_job) {
      counts[param->daemon_param] += 1;
    }
    param->left_in_job = in_trainers && param->in_job;
    param->in_job = false;
  }
  for (size_t i = 0; !in_trainers && i < shards_.size(); ++i) {
    shards_[i]->ForgetInJob();
  }
}

}  // namespace shardd::python
