// Forward and backward: who holds which group unsharded.

#include "client/torch/sharded_state.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

namespace shardd::internal {
namespace {

std::string RankText(const Job& job) { return "rank=" + std::to_string(job.info().rank); }

}  // namespace

Use::Use(std::shared_ptr<ShardedState> owner, int32_t use_group)
    : state(owner), group(use_group), generation(owner->generation()) {}

Use::~Use() {
  const std::shared_ptr<ShardedState> owner = state.lock();
  if (awaits_end && owner != nullptr && owner->generation() == generation) {
    --owner->group_at(group).awaiting_end;  // its graph was dropped without a backward
  }
}

Status ShardedState::CheckAlive(const Use& use) const {
  if (job_ == nullptr) {
    return Status(Code::kFailedPrecondition, "use a sharded module: its job is finished");
  }
  if (use.generation != generation()) {
    return Status(Code::kFailedPrecondition, "backward of group \"" + groups_[static_cast<size_t>(use.group)].name +
                                                 "\": its forward was before the last Reattach (" + RankText(*job_) +
                                                 "); run forward again");
  }
  return Status();
}

Status ShardedState::AddReader(int32_t index) {
  GroupState& group = group_at(index);
  if (group.readers == 0) {
    for (const int32_t p : group.params) {
      ParamState& param = params_[static_cast<size_t>(p)];
      for (const at::Tensor& tensor : param.tensors) {
        if (!param.storage->Holds(tensor)) {
          return Status(Code::kFailedPrecondition,
                        "unshard parameter \"" + param.fqn +
                            "\": its tensor was given another storage (set_data, to, share_memory); parameters of a "
                            "sharded module keep theirs");
        }
      }
      param.storage->PointTo(job_->parameter_data(p));
    }
  }
  ++group.readers;
  return Status();
}

void ShardedState::DropReader(int32_t index) {
  GroupState& group = group_at(index);
  if (--group.readers == 0) {
    for (const int32_t p : group.params) {
      params_[static_cast<size_t>(p)].storage->Clear();
    }
  }
}

Status ShardedState::Acquire(Use* use, shardd_phase phase) {
  GroupState& group = group_at(use->group);
  if (use->hold_stamp != group.hold_stamp) {
    use->hold_stamp = group.hold_stamp;
    use->holds = use->in_backward = false;
  }
  Status status = lives_.Unshard(use->group, phase);
  if (status.ok()) {
    status = lives_.Wait(use->group);
  }
  for (size_t i = 0; status.ok() && i < group.also_unshards.size(); ++i) {
    status = AddReader(group.also_unshards[i]);
  }
  if (status.ok()) {
    status = AddReader(use->group);
  }
  use->holds = status.ok();
  return status;
}

Status ShardedState::Release(Use* use) {
  GroupState& group = group_at(use->group);
  if (!std::exchange(use->holds, false) || use->hold_stamp != group.hold_stamp) {
    return Status();
  }
  DropReader(use->group);
  for (const int32_t other : group.also_unshards) {
    DropReader(other);
  }
  return lives_.Reshard(use->group);
}

std::shared_ptr<Use> ShardedState::BeginForward(int32_t group) {
  auto use = std::make_shared<Use>(shared_from_this(), group);
  ThrowIfError(CheckAlive(*use));
  use->recomputes = torch::autograd::get_current_graph_task_id() != -1;
  ThrowIfError(Acquire(use.get(), use->recomputes ? SHARDD_BACKWARD : SHARDD_FORWARD));
  return use;
}

void ShardedState::EndForward(const std::shared_ptr<Use>& use, bool has_backward) {
  GroupState& group = group_at(use->group);
  if (has_backward) {
    while (!order_.empty() && order_.back().expired()) {
      order_.pop_back();  // of forwards that nobody will run backward
    }
    use->order = order_.size();
    order_.push_back(use);
    lives_.RanForward(use->group);
    if (!group.reshard_after_forward || use->recomputes) {
      return;
    }
  }
  ThrowIfError(Release(use.get()));
}

void ShardedState::AbandonForward(Use* use) {
  if (job_ != nullptr && use->generation == generation()) {
    // The trainer's own error is on its way out; one of the reshard would come up again at the next call.
    (void)Release(use);
  }
}

void ShardedState::BeginBackward(Use* use) {
  ThrowIfError(CheckAlive(*use));
  GroupState& group = group_at(use->group);
  const bool current = use->hold_stamp == group.hold_stamp;
  if (current && use->in_backward) {
    return;  // another output of the same forward was here first
  }
  if (!current || !use->holds) {
    ThrowIfError(Acquire(use, SHARDD_BACKWARD));
  }
  use->in_backward = true;
  if (options_.prefetch_on_begin) {
    ThrowIfError(PrefetchBefore(use->order));
  }
}

void ShardedState::EndBackward(Use* use) {
  ThrowIfError(CheckAlive(*use));
  GroupState& group = group_at(use->group);
  use->in_backward = false;
  if (use->awaits_end) {
    use->awaits_end = false;
    --group.awaiting_end;
  }
  if (group.awaiting_end == 0) {
    ThrowIfError(lives_.Submit(use->group));
  }
  // With create_graph what this backward computed is run backward, too, and reads the parameters: until BackwardDone,
  // or until that backward comes through here.
  if (!at::GradMode::is_enabled()) {
    ThrowIfError(Release(use));
  }
  if (options_.prefetch_on_end) {
    ThrowIfError(PrefetchBefore(use->order));
  }
}

Status ShardedState::PrefetchBefore(size_t order) {
  for (size_t i = std::min(order, order_.size()); i > 0; --i) {
    const std::shared_ptr<Use> use = order_[i - 1].lock();
    if (use == nullptr) {
      continue;
    }
    if (lives_.prefetched(use->group)) {
      return Status();
    }
    if (lives_.holds(use->group) == 0) {  // else unsharded since forward: its backward needs nothing more
      return lives_.Prefetch(use->group);
    }
  }
  return Status();
}

Status ShardedState::ReshardAll() {
  Status first;
  for (size_t g = 0; g < groups_.size(); ++g) {
    Status status = lives_.ReshardAll(static_cast<int32_t>(g));
    if (first.ok()) {
      first = std::move(status);
    }
    ++groups_[g].hold_stamp;
    if (groups_[g].readers > 0) {
      groups_[g].readers = 0;
      for (const int32_t p : groups_[g].params) {
        params_[static_cast<size_t>(p)].storage->Clear();
      }
    }
  }
  return first;
}

}  // namespace shardd::internal
