#include "client/python/extension/unit.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <utility>

#include "client/python/extension/errors.h"
#include "client/python/extension/nodes.h"
#include "client/python/extension/tensors.h"

namespace shardd::python {
namespace {

bool InBackward() { return torch::autograd::get_current_graph_task_id() != -1; }

// Never freed: it may be used until the interpreter is gone.
py::object* inference_check = nullptr;
py::object* move_inputs = nullptr;

[[noreturn]] void RaiseChanged(const ManagedParam& param) {
  RaiseAssertion("unshard parameter \"" + param.fqn +
                 "\": FSDP does not support changing the parameters between forward and backward; change it between a "
                 "backward and the next forward");
}

}  // namespace

void SetInferenceCheck(py::object check) { inference_check = new py::object(std::move(check)); }

void SetMoveInputs(py::object move) { move_inputs = new py::object(std::move(move)); }

uint64_t Unit::generation() const { return engine_ == nullptr ? 0 : engine_->generation(); }

void Unit::set_idle() {
  state_training_ = Training::kIdle;
  group_training_ = Training::kIdle;
}

void Unit::Bind(std::shared_ptr<Engine> engine, const std::vector<int>& groups) {
  engine_ = std::move(engine);
  group_ids_ = groups;
  groups_.clear();
  for (const int id : groups) {
    groups_.push_back({id, engine_->job().group(id).info().trainable != 0, {}});
  }
  engine_->AddUnit(this);
}

void Unit::AddParam(std::shared_ptr<ManagedParam> param, std::vector<Place> places) {
  const size_t index = params_.size();
  groups_[param->unit_group].params.push_back(index);
  if (param->trainable) {
    param->InstallAccumulator(MakeAccumulator(weak_from_this(), index));
  }
  if (std::find(shards_.begin(), shards_.end(), param->shared_shard()) == shards_.end()) {
    shards_.push_back(param->shared_shard());
  }
  uses_.push_back({param, std::move(places)});
  params_.push_back(std::move(param));
}

void Unit::BorrowParam(const Unit& owner, int daemon_param, std::vector<Place> places) {
  for (const Use& use : owner.stored_uses_) {
    if (use.param->daemon_param == daemon_param) {
      stored_uses_.push_back({use.param, places});
    }
  }
  uses_.push_back({owner.FindParam(daemon_param), std::move(places)});
}

void Unit::AddStored(std::shared_ptr<ManagedParam> param) {
  if (param->trainable) {
    param->InstallAccumulator(MakeAccumulator(weak_from_this(), params_.size() - 1));
  }
  stored_uses_.push_back({std::move(param), uses_.back().places});
}

void Unit::set_full_precision(bool full_precision) {
  full_precision = full_precision && stored_uses_.size() == uses_.size();
  if (full_precision != full_precision_) {
    ToSharded();
    full_precision_ = full_precision;
  }
}

void Unit::RegisterParams(bool unsharded) {
  const ManagedParam* changed = nullptr;
  for (const Use& use : uses()) {
    if (!use.param->Register(use.places, unsharded)) {
      changed = use.param.get();
    }
  }
  if (changed != nullptr) {
    RaiseChanged(*changed);
  }
}

void Unit::CheckKept() {
  const ManagedParam* changed = nullptr;
  for (const Use& use : uses()) {
    if (!use.param->RestoreUnsharded(use.places)) {
      changed = use.param.get();
    }
  }
  if (changed != nullptr) {
    RaiseChanged(*changed);
  }
}

void Unit::CheckUnchanged() const {
  if (!HasChanges()) {
    return;
  }
  std::vector<Change> changes;
  FindChanges(&changes);
  const auto found = std::find_if(params_.begin(), params_.end(), [&](const auto& param) {
    return !changes.empty() && param->shared_shard() == changes.front().shard;
  });
  RaiseChanged(found == params_.end() ? *uses().front().param : **found);
}

void Unit::ShowShards() {
  if (shows_shards && unsharded_ && !shards_shown_) {
    RegisterParams(/*unsharded=*/false);
    shards_shown_ = true;
  }
}

void Unit::HideShards() {
  if (shards_shown_) {
    CheckUnchanged();
    shards_shown_ = false;
    RegisterParams(/*unsharded=*/true);
  }
}

py::object Unit::PreForward(py::handle args, py::handle kwargs) {
  if (engine_ == nullptr || !engine_->alive()) {
    lazy_init_(/*extend=*/false);
  }
  if (engine_ == nullptr) {
    return py::none();  // nothing to shard in the whole model
  }
  engine_->CheckOutsideFullParams("forward of a fully sharded module");
  py::object new_args = py::reinterpret_borrow<py::object>(args);
  py::object new_kwargs = py::reinterpret_borrow<py::object>(kwargs);
  const bool in_backward = InBackward();
  if (state_training_ == Training::kPreBackward && !in_backward) {
    engine_->ResetIteration();  // an exception ended that backward
  }
  const bool recomputes = state_training_ == Training::kPreBackward;
  bool entering = false;
  if (!recomputes) {
    if (state_training_ != Training::kForward || engine_->IsRoot(this)) {
      // What was stepped and written is committed now, so that it may go to a job that trains more.
      if (engine_->RootPreForward(this)) {
        if (c10::GradMode::is_enabled() && engine_->WantsExtension()) {
          lazy_init_(/*extend=*/true);
          engine_->RootPreForward(this);
        }
        if (!engine_->device().is_cpu() && move_inputs != nullptr) {
          const py::tuple moved = (*move_inputs)(new_args, new_kwargs, engine_->device());
          new_args = moved[0];
          new_kwargs = moved[1];
        }
      }
    }
    state_training_ = Training::kForward;
    entering = group_training_ != Training::kForward;
    group_training_ = Training::kForward;
  }
  if (cast_inputs && !full_precision_) {
    const auto cast = [this](const at::Tensor& tensor) {
      return at::isFloatingType(tensor.scalar_type()) && tensor.scalar_type() != param_dtype ? tensor.to(param_dtype)
                                                                                             : at::Tensor();
    };
    new_args = MapTensors(new_args, cast);
    new_kwargs = MapTensors(new_kwargs, cast);
  }
  const bool with_gradients = c10::GradMode::is_enabled();
  if (!with_gradients && inference_check != nullptr) {
    (*inference_check)();
  }
  Unshard();
  if (entering && with_gradients) {
    PostBackwardInputs inputs(weak_from_this(), engine_->generation());
    const auto pass = [&inputs](const at::Tensor& tensor) {
      return tensor.requires_grad() ? inputs.Pass(tensor) : at::Tensor();
    };
    new_args = MapTensors(new_args, pass);
    new_kwargs = MapTensors(new_kwargs, pass);
  }
  if (new_args.is(args) && new_kwargs.is(kwargs)) {
    return py::none();
  }
  return py::make_tuple(std::move(new_args), std::move(new_kwargs));
}

bool Unit::RegisterPreBackward(py::handle output) {
  bool any = false;
  MapTensors(output, [this, &any](const at::Tensor& tensor) {
    if (tensor.requires_grad()) {
      if (tensor.is_view() && !any &&
          PyErr_WarnEx(
              PyExc_UserWarning,
              "a fully sharded module returned a view: an in-place operation on it (`out += y`) drops the hook "
              "that unshards before backward; use `out = out + y`, or return a clone",
              2) != 0) {
        throw py::error_already_set();
      }
      HookOutput(tensor, weak_from_this(), engine_->generation());
      any = true;
    }
    return at::Tensor();
  });
  return any;
}

py::object Unit::CastOutput(py::handle output) {
  if (!cast_outputs) {
    return py::reinterpret_borrow<py::object>(output);
  }
  return MapTensors(output, [this](const at::Tensor& tensor) {
    return at::isFloatingType(tensor.scalar_type()) && tensor.scalar_type() != output_dtype ? tensor.to(output_dtype)
                                                                                            : at::Tensor();
  });
}

py::object Unit::PostForward(py::handle output) {
  if (state_training_ == Training::kPreBackward || engine_ == nullptr) {
    return CastOutput(output);
  }
  if (!InBackward()) {
    Reshard();
    ShowShards();
  }
  group_training_ = Training::kIdle;
  const bool has_backward = c10::GradMode::is_enabled() && RegisterPreBackward(output);
  for (size_t i = 0; has_backward && i < groups_.size(); ++i) {
    lives().RanForward(groups_[i].id);
  }
  state_training_ = Training::kIdle;
  py::object result = CastOutput(output);
  return engine_->EndForward(this, std::move(result), has_backward);
}

void Unit::AskDaemon(bool backward) {
  engine_->CheckOutsideFullParams("unshard");
  engine_->EnterPassByHand(backward);
  CheckUnchanged();
  for (const Group& group : groups_) {
    if (lives().holds(group.id) == 0) {
      Check(lives().Unshard(group.id, backward ? SHARDD_BACKWARD : SHARDD_FORWARD));
    }
  }
}

void Unit::RequestUnshard() {
  if (unsharded_) {
    Unshard();  // of a pass that is paused, or with the shards shown
  } else if (!groups_.empty()) {
    AskDaemon(group_training_ == Training::kPreBackward || InBackward());
    requested_ = true;
  }
}

void Unit::WaitForUnshard() {
  if (requested_) {
    Unshard();
  }
}

void Unit::Unshard() {
  if (groups_.empty()) {
    return;
  }
  requested_ = false;
  const bool backward = group_training_ == Training::kPreBackward || InBackward();
  if (unsharded_ && engine_->paused() && !backward) {
    engine_->EnterPassByHand(/*backward=*/false);
  }
  if (unsharded_) {
    HideShards();
    return;
  }
  if (!unshard_in_backward && group_training_ == Training::kPreBackward) {
    return;
  }
  AskDaemon(backward);
  for (const Group& group : groups_) {
    Check(lives().Wait(group.id));
  }
  engine_->set_settled();
  const Job& job = engine_->job();
  for (const Use& use : uses()) {
    const int param = use.param->daemon_param;
    use.param->PointUnsharded(full_precision_ ? shardd_stored_parameter_data(job.c_job(), param)
                                              : job.parameter_data(param));
  }
  unsharded_ = true;
  RegisterParams(/*unsharded=*/true);
}

void Unit::Reshard() {
  if (group_training_ == Training::kForward && !reshard_after_forward) {
    return;
  }
  ToSharded();
}

void Unit::ReshardByHand() {
  Reshard();
  if (engine_ != nullptr) {
    engine_->LeavePassByHand();
  }
}

void Unit::ToSharded() {
  const ManagedParam* written = nullptr;
  if (unsharded_) {
    unsharded_ = false;
    for (const Use& use : uses()) {
      use.param->ClearUnsharded();
      written = use.param->TakeWritten() ? use.param.get() : written;
    }
    if (!std::exchange(shards_shown_, false)) {
      RegisterParams(/*unsharded=*/false);
    }
  }
  for (const Group& group : groups_) {
    Check(lives().ReshardAll(group.id));
  }
  if (written != nullptr) {
    Check(Status(Code::kFailedPrecondition,
                 "write parameter \"" + written->fqn +
                     "\": it was written while it was unsharded, into a copy that is gone now; write the sharded "
                     "parameter, between a backward and the next forward"));
  }
}

bool Unit::HasUnfrozen() const {
  return std::any_of(params_.begin(), params_.end(),
                     [](const auto& param) { return !param->trainable && param->requires_grad(); });
}

void Unit::CheckGradientsAreShown() const {
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

std::shared_ptr<ManagedParam> Unit::FindParam(int daemon_param) const {
  const auto found = std::find_if(params_.begin(), params_.end(),
                                  [&](const auto& param) { return param->daemon_param == daemon_param; });
  return found == params_.end() ? nullptr : *found;
}

HeldShard* Unit::FindShard(int daemon_param) const {
  const auto found = std::find_if(shards_.begin(), shards_.end(),
                                  [&](const auto& shard) { return shard->daemon_param == daemon_param; });
  return found == shards_.end() ? nullptr : found->get();
}

}  // namespace shardd::python
