// The ends of a unit: of its job, of itself, and what of it outlives both.

#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {

Unit::~Unit() {
  // The last reference may be a graph's, which is freed without the GIL.
  const py::gil_scoped_acquire gil;
  if (engine_ != nullptr) {
    if (engine_->has_memory()) {
      try {
        for (const auto& shard : shards_) {  // the program may hold parameters longer than their module
          shard->CopyShardOut();
          shard->ForgetShard();
        }
      } catch (...) {
        // A GPU that is lost: there is nobody to tell.
      }
    }
    engine_->RemoveUnit(this);
  }
  uses_.clear();
  stored_uses_.clear();
  params_.clear();
  shards_.clear();
  lazy_init_ = py::object();
  engine_.reset();
}

void Unit::Unbind() {
  if (engine_ == nullptr) {
    return;
  }
  if (unsharded_) {
    unsharded_ = false;
    for (const Use& use : uses()) {
      use.param->ClearUnsharded();
      if (!shards_shown_) {
        use.param->Register(use.places, /*unsharded=*/false);
      }
    }
    shards_shown_ = false;
  }
  for (const auto& shard : shards_) {
    shard->CopyShardOut();
    shard->ForgetShard();
  }
  engine_->RemoveUnit(this);
  engine_.reset();
  uses_.clear();
  stored_uses_.clear();
  params_.clear();
  shards_.clear();
  groups_.clear();
  group_ids_.clear();
  set_idle();
}

void Unit::CopyShardsOut() {
  ToSharded();
  for (const auto& shard : shards_) {
    shard->CopyShardOut();
  }
}

void Unit::CheckInGraph(uint64_t generation) const {
  if (engine_ == nullptr) {
    Check(Status(Code::kFailedPrecondition, "backward of a fully sharded module: the module is gone"));
  }
  if (generation != 0 && generation != engine_->generation()) {
    Check(Status(Code::kFailedPrecondition,
                 "backward of a fully sharded module: its forward was run before the job was attached again; run the "
                 "step from its beginning"));
  }
}

void Unit::BeginHiddenBackward() {
  const py::gil_scoped_acquire gil;
  CheckInGraph(/*generation=*/0);
  if (!engine_->final_queued()) {
    PreBackward(/*generation=*/0);
  }
}

void Unit::LoadMemory() {
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
      auto* rows =
          static_cast<float*>(shardd_optimizer_state_data(job, shard->daemon_param, static_cast<int32_t>(state)));
      shard->PointState(state, rows + shard->first_element);
    }
  }
}

void Unit::LoseMemory() {
  for (const auto& param : params_) {
    param->LoseMemory();
  }
  for (const Use& use : stored_uses_) {
    use.param->LoseMemory();
  }
}

void Unit::ForgetMemory() {
  for (const Group& group : groups_) {
    lives().Forget(group.id);
  }
  if (unsharded_) {
    for (const Use& use : uses()) {
      use.param->ClearUnsharded();
    }
    if (!std::exchange(shards_shown_, false)) {
      RegisterParams(/*unsharded=*/false);
    }
  }
  for (const auto& param : params_) {
    param->Forget();
  }
  for (const auto& shard : shards_) {
    shard->ForgetGradient();
  }
  unsharded_ = requested_ = false;
  set_idle();
}

}  // namespace shardd::python
