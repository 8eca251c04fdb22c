#include "client/python/extension/unit.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <iterator>
#include <string>
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

}  // namespace

void SetInferenceCheck(py::object check) { inference_check = new py::object(std::move(check)); }

void SetMoveInputs(py::object move) { move_inputs = new py::object(std::move(move)); }

void Unit::Bind(std::shared_ptr<Engine> engine, const std::vector<int>& groups) {
  engine_ = std::move(engine);
  life_.Bind(&engine_->groups(), groups);
  gradients_.Bind(*engine_);
  engine_->AddUnit(this);
}

void Unit::AddParam(std::shared_ptr<ManagedParam> param, std::vector<Place> places) {
  if (param->trainable) {
    param->InstallAccumulator(MakeAccumulator(weak_from_this(), gradients_.params().size()));
  }
  shown_.Add(param, std::move(places));
  gradients_.AddParam(std::move(param));
}

void Unit::AddStored(std::shared_ptr<ManagedParam> param) {
  if (param->trainable) {
    param->InstallAccumulator(MakeAccumulator(weak_from_this(), gradients_.params().size() - 1));
  }
  shown_.AddStored(std::move(param));
}

void Unit::SetUnsharded(int daemon_param, py::object unsharded) {
  const auto& params = gradients_.params();
  const auto found = std::find_if(params.begin(), params.end(),
                                  [daemon_param](const auto& param) { return param->daemon_param == daemon_param; });
  if (found == params.end()) {
    RaiseAssertion("unshard: parameter " + std::to_string(daemon_param) + " of the job is not the unit's");
  }
  (*found)->SetUnsharded(std::move(unsharded));
  if ((*found)->trainable) {
    (*found)->InstallAccumulator(
        MakeAccumulator(weak_from_this(), static_cast<size_t>(std::distance(params.begin(), found))));
  }
}

void Unit::set_full_precision(bool wanted) {
  const bool full_precision = shown_.FullPrecision(wanted);
  if (full_precision != shown_.is_full_precision()) {
    ToSharded();
    shown_.set_full_precision(full_precision);
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
  if (life_.recomputes() && !in_backward) {
    engine_->ResetIteration();  // an exception ended that backward
  }
  bool entering = false;
  if (!life_.recomputes()) {
    if (!life_.in_forward() || engine_->IsRoot(this)) {
      // What was stepped and written is committed now, so that it may go to a job that trains more.
      if (engine_->RootPreForward(this)) {
        if (c10::GradMode::is_enabled() && engine_->WantsExtension()) {
          lazy_init_(/*extend=*/true);
          engine_->RootPreForward(this);
        }
        if (!engine_->attached().device().is_cpu() && move_inputs != nullptr) {
          const py::tuple moved = (*move_inputs)(new_args, new_kwargs, engine_->attached().device());
          new_args = moved[0];
          new_kwargs = moved[1];
        }
      }
    }
    entering = life_.BeginForward();
  }
  if (cast_inputs && !shown_.is_full_precision()) {
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
    PostBackwardInputs inputs(weak_from_this(), engine_->iteration().generation());
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
      HookOutput(tensor, weak_from_this(), engine_->iteration().generation());
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
  if (life_.recomputes() || engine_ == nullptr) {
    return CastOutput(output);
  }
  if (!InBackward()) {
    Reshard();
    if (shows_shards) {
      shown_.ShowShards();
    }
  }
  const bool has_backward = c10::GradMode::is_enabled() && RegisterPreBackward(output);
  life_.EndForward(has_backward);
  py::object result = CastOutput(output);
  return engine_->EndForward(this, std::move(result), has_backward);
}

void Unit::AskDaemon(bool backward) {
  engine_->CheckOutsideFullParams("unshard");
  engine_->EnterPassByHand(backward);
  shown_.CheckUnchanged();
  Check(life_.Unshard(backward ? SHARDD_BACKWARD : SHARDD_FORWARD));
}

void Unit::RequestUnshard() {
  if (shown_.unsharded()) {
    Unshard();  // since a forward that may have a backward, or with the shards shown
  } else if (!life_.groups().empty()) {
    AskDaemon(life_.training() == fsdp::Training::kPreBackward || InBackward());
    requested_ = true;
  }
}

void Unit::WaitForUnshard() {
  if (requested_) {
    Unshard();
  }
}

void Unit::Unshard() {
  if (life_.groups().empty()) {
    return;
  }
  requested_ = false;
  const bool pre_backward = life_.training() == fsdp::Training::kPreBackward;
  const bool backward = pre_backward || InBackward();
  if (shown_.unsharded() && engine_->passes().stopped_reading() && !backward) {
    engine_->EnterPassByHand(/*backward=*/false);
  }
  if (shown_.unsharded()) {
    shown_.HideShards();
    return;
  }
  if (!unshard_in_backward && pre_backward) {
    return;
  }
  AskDaemon(backward);
  Check(life_.Wait());
  engine_->attached().set_settled();
  GatherExtension();
  shown_.ShowUnsharded(engine_->job());
}

void Unit::GatherExtension() {
  if (!extension_) {
    return;
  }
  try {
    extension_(true);
  } catch (...) {
    // The error is the program's to handle; modules keep the sharded parameters, and the next forward asks anew.
    (void)life_.ReshardAll();
    throw;
  }
}

void Unit::Reshard() {
  if (life_.training() == fsdp::Training::kForward && !reshard_after_forward) {
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
  const bool frees = shown_.unsharded() && extension_;
  const ManagedParam* const written = shown_.ShowSharded();
  if (frees) {
    extension_(false);
  }
  Check(life_.ReshardAll());
  if (written != nullptr) {
    Check(Status(Code::kFailedPrecondition,
                 "write parameter \"" + written->fqn +
                     "\": it was written while it was unsharded, into a copy that is gone now; write the sharded "
                     "parameter, between a backward and the next forward"));
  }
}

}  // namespace shardd::python
