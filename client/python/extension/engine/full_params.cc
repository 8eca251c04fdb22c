// Full parameters and gradients, as stored: entered by all ranks together, copied out, written back.

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {

bool Engine::in_forward_backward() const {
  return forward_root_ != nullptr || torch::autograd::get_current_graph_task_id() != -1;
}

void Engine::EnterFullParams(const Job::FullParams& options) {
  gradients_used_ = false;  // some may be written
  CheckOutsideFullParams("enter full parameters");
  CheckBetweenPasses("enter full parameters");
  ReshardAll();
  if (passes_) {
    CloseWindow();  // some rank may have one open
  }
  shardd_full_params_options c{};
  c.struct_size = sizeof(c);
  c.group = options.group;
  c.recurse = options.recurse ? 1 : 0;
  c.writeback = options.writeback ? 1 : 0;
  c.rank0_only = options.rank0_only ? 1 : 0;
  c.offload_to_cpu = options.offload_to_cpu ? 1 : 0;
  c.with_grads = options.with_grads ? 1 : 0;
  {
    const NoGil no_gil;
    Check(Status::Take(shardd_enter_full_params_with(job().c_job(), &c)));
  }
  full_params_ = true;
  for (Unit* unit : units_) {
    unit->HideOwnGradients();
  }
}

void Engine::LeaveFullParams() {
  full_params_ = false;
  for (Unit* unit : units_) {
    unit->ShowOwnGradients();
  }
  const NoGil no_gil;
  Check(Status::Take(shardd_leave_full_params(job().c_job())));
}

void Engine::CheckOutsideFullParams(const char* what) const {
  if (full_params_) {
    Check(Status(Code::kFailedPrecondition, std::string(what) +
                                                ": full parameters are summoned; leave the summon_full_params context "
                                                "first"));
  }
}

bool Engine::CopyOut(int param, const void* data, at::Tensor& out) {
  if (data == nullptr) {
    return false;
  }
  for (const Unit* unit : units_) {
    if (const auto managed = unit->FindParam(param); managed != nullptr) {
      const NoGil no_gil;
      managed->CopyOut(data, state_device(), out);
      return true;
    }
  }
  return false;
}

bool Engine::CopyFullParameter(int param, at::Tensor out) {
  return CopyOut(param, shardd_full_parameter_data(job().c_job(), param), out);
}

bool Engine::CopyFullGradient(int param, at::Tensor out) {
  return CopyOut(param, shardd_full_gradient_data(job().c_job(), param), out);
}

void Engine::WriteGradient(int param, const at::Tensor& rows, int64_t first) {
  const NoGil no_gil;
  const at::Tensor dense = rows.to(at::kCPU, at::kFloat).contiguous();
  Check(job().WriteGradient(param, dense.const_data_ptr(), first, dense.numel()));
}

void Engine::SettleGradients() {
  for (Unit* unit : units_) {
    unit->HideOwnGradients();
    unit->SettleGradients(/*stepping=*/false);
    if (!full_params_) {
      unit->ShowOwnGradients();
    }
  }
}

void Engine::TakeGradient(int param) {
  for (Unit* unit : units_) {
    if (const auto managed = unit->FindParam(param); managed != nullptr) {
      managed->HideOwnGradient();
      managed->TakeGradient(steps_);
      managed->ShowOwnGradient();
    }
  }
}

bool Engine::HasGradient(int param) const {
  return std::any_of(units_.begin(), units_.end(), [param](const Unit* unit) {
    const auto managed = unit->FindParam(param);
    return managed != nullptr && managed->in_job;
  });
}

}  // namespace shardd::python
