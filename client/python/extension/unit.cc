#include "client/python/extension/unit.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "client/python/extension/errors.h"
#include "client/python/extension/nodes.h"
#include "client/python/extension/tensors.h"

namespace shardd::python {
namespace {

bool InBackward() { return torch::autograd::get_current_graph_task_id() != -1; }

uint8_t BitOf(const ManagedParam& param) { return static_cast<uint8_t>(1u << (param.index_in_group % 8)); }
size_t ByteOf(const ManagedParam& param) { return static_cast<size_t>(param.index_in_group) / 8; }

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
    const shardd_group_info info = engine_->job().group(id).info();
    Group group;
    group.id = id;
    group.trainable = info.trainable != 0;
    group.present.assign((static_cast<size_t>(info.param_count) + 7) / 8, 0);
    group.fresh = group.present;
    groups_.push_back(std::move(group));
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
  ran_forward_ = ran_forward_ || has_backward;
  state_training_ = Training::kIdle;
  py::object result = CastOutput(output);
  return engine_->EndForward(this, std::move(result), has_backward);
}

void Unit::AskDaemon(bool backward) {
  engine_->CheckOutsideFullParams("unshard");
  engine_->EnterPassByHand(backward);
  CheckUnchanged();
  for (Group& group : groups_) {
    if (group.holds == 0) {
      Check(engine_->job().group(group.id).UnshardAsync(backward ? SHARDD_BACKWARD : SHARDD_FORWARD));
      ++group.holds;
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
  Job& job = engine_->job();
  const bool may_wait = !engine_->settled();
  for (Group& group : groups_) {
    std::optional<NoGil> no_gil;
    if (may_wait) {
      no_gil.emplace();
    }
    Check(job.group(group.id).Wait());
  }
  engine_->set_settled();
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
  for (Group& group : groups_) {
    group.stays = false;
    for (; group.holds > 0; --group.holds) {
      Check(engine_->job().group(group.id).Reshard());
    }
  }
  if (written != nullptr) {
    Check(Status(Code::kFailedPrecondition,
                 "write parameter \"" + written->fqn +
                     "\": it was written while it was unsharded, into a copy that is gone now; write the sharded "
                     "parameter, between a backward and the next forward"));
  }
}

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
  for (Group& group : groups_) {
    group.holds = 0;
    group.slot_ready = group.dirty = group.submitted = group.stays = false;
    std::fill(group.present.begin(), group.present.end(), uint8_t{0});
    std::fill(group.fresh.begin(), group.fresh.end(), uint8_t{0});
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
  unsharded_ = requested_ = ran_forward_ = false;
  set_idle();
}

}  // namespace shardd::python
