// A unit in backward: its parameters unsharded again, its gradients into the daemon's slots, and the end.

#include <algorithm>
#include <utility>

#include "client/python/extension/errors.h"
#include "client/python/extension/nodes.h"
#include "client/python/extension/tensors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {
namespace {

uint8_t BitOf(const ManagedParam& param) { return static_cast<uint8_t>(1u << (param.index_in_group % 8)); }
size_t ByteOf(const ManagedParam& param) { return static_cast<size_t>(param.index_in_group) / 8; }

}  // namespace

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
  for (Group& group : groups_) {
    if (group.dirty) {
      Submit(group);
    }
  }
  if (reshard_after_backward) {
    ToSharded();
  }
}

void Unit::PrepareSlot(Group& group) {
  engine_->TakeSlot(this, group.id);
  {
    const Waiting waiting;
    std::optional<NoGil> no_gil;
    if (PyGILState_Check() != 0) {
      no_gil.emplace();
    }
    Check(engine_->job().group(group.id).WaitGradientSlot());
  }
  group.slot_ready = true;
}

void Unit::OnGradient(size_t index, const at::Tensor& gradient) {
  ManagedParam& param = *params_[index];
  Group& group = groups_[param.unit_group];
  (void)engine_->job();  // in the order of the stream that this gradient is written in
  if (KeepsOwnGradient(param)) {
    param.AddOwnGradient(gradient);
    return;
  }
  if (!group.slot_ready) {
    PrepareSlot(group);
  }
  if (!param.in_slot) {
    if (param.BeginGradient(engine_->steps())) {
      group.fresh[ByteOf(param)] |= BitOf(param);
    }
    group.present[ByteOf(param)] |= BitOf(param);
  }
  param.WriteGradient(gradient, gradient_scale, /*add=*/param.in_slot);
  if (!param.in_slot && !param.contributed) {
    param.WriteOwnGradient(gradient_scale);
  }
  param.in_slot = true;
  group.dirty = true;
}

void Unit::Submit(Group& group) {
  ParameterGroup handle = engine_->job().group(group.id);
  if (group.stays) {
    Check(handle.UnshardAsync(SHARDD_BACKWARD));
    Check(handle.Wait());
  }
  for (const size_t index : group.params) {
    if (params_[index]->trainable) {
      params_[index]->shard().LeaveGradientToJob(engine_->steps(), shows_gradients());
    }
  }
  {
    const Waiting waiting;  // a stream may have to be waited for
    std::optional<NoGil> no_gil;
    if (PyGILState_Check() != 0) {
      no_gil.emplace();
    }
    Check(handle.SubmitGradients(group.present.data(), group.fresh.data()));
  }
  if (std::exchange(group.stays, false)) {
    Check(handle.Reshard());
  }
  for (const size_t index : group.params) {
    ManagedParam& param = *params_[index];
    if (param.in_slot) {
      param.in_slot = false;
      param.pending = param.in_job = param.contributed = true;
      param.left_in_job = false;
    }
  }
  std::fill(group.present.begin(), group.present.end(), uint8_t{0});
  std::fill(group.fresh.begin(), group.fresh.end(), uint8_t{0});
  group.dirty = false;
  group.slot_ready = false;
  group.submitted = true;
}

void Unit::SubmitGroup(int id) {
  for (Group& group : groups_) {
    if (group.id == id && group.dirty) {
      Submit(group);
    }
  }
}

void Unit::CompleteFlatGradients() {
  const auto has_gradient = [](const ManagedParam& param) { return param.contributed || param.in_slot; };
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
  for (size_t index = 0; ran_forward_ && index < params_.size(); ++index) {
    ManagedParam& param = *params_[index];
    if (!param.contributed && !param.in_slot && !KeepsOwnGradient(param) && param.has_own_gradient()) {
      OnGradient(index, param.ZeroGradient());
    }
  }
}

void Unit::SubmitRest() {
  SubmitOwnGradients();
  CompleteFlatGradients();
  for (Group& group : groups_) {
    if (!group.trainable) {
      continue;
    }
    if (reduce_scatter_unused_params) {
      for (const size_t index : group.params) {
        ManagedParam& param = *params_[index];
        if (param.trainable && param.requires_grad() && !param.contributed && !param.in_slot) {
          OnGradient(index, param.ZeroGradient());
        }
      }
    }
    // Ran forward without any gradient: says so with an empty mask, which is PyTorch's None and no missing
    // contribution.
    if (!group.dirty && ran_forward_ && !group.submitted) {
      PrepareSlot(group);
      group.dirty = true;
    }
    if (group.dirty && !ran_forward_) {
      // The rank has not touched the group: it takes part in its backward all the same.
      ParameterGroup handle = engine_->job().group(group.id);
      Check(handle.UnshardAsync(SHARDD_BACKWARD));
      Check(handle.Wait());
      Submit(group);
      Check(handle.Reshard());
    } else if (group.dirty) {
      Submit(group);
    }
  }
}

void Unit::EndBackward() {
  ran_forward_ = false;
  EndGroups();
}

void Unit::EndPartialBackward() {
  if (group_training_ == Training::kPostBackward) {
    EndGroups();
  }
}

void Unit::EndGroups() {
  for (Group& group : groups_) {
    group.submitted = false;
    group.stays = unsharded_;
  }
  for (const auto& param : params_) {
    if (std::exchange(param->contributed, false)) {
      param->shard().DropOwnGradient();
    }
  }
  set_idle();
}

void Unit::AbandonBackward() {
  for (Group& group : groups_) {
    group.slot_ready = group.dirty = false;
    std::fill(group.present.begin(), group.present.end(), uint8_t{0});
    std::fill(group.fresh.begin(), group.fresh.end(), uint8_t{0});
  }
  for (const auto& param : params_) {
    param->in_slot = false;
    // The job may have what other ranks needed of it, so `in_job` stays: a step without `.grad` then drops it.
    param->pending = param->pending && !param->contributed;
    param->contributed = false;  // its own gradient stays
  }
  EndBackward();
  ShowOwnGradients();
}

}  // namespace shardd::python
