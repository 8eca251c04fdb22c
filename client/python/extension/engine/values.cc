#include "client/python/extension/engine/values.h"

#include <string.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_set>

#include "client/python/extension/errors.h"
#include "client/python/extension/memory.h"
#include "client/python/extension/unit.h"

namespace shardd::python {
namespace {

bool CopyOut(Engine& engine, int param, const void* data, at::Tensor& out) {
  const std::shared_ptr<ManagedParam> managed = data == nullptr ? nullptr : engine.FindManaged(param);
  if (managed == nullptr) {
    return false;
  }
  const NoGil no_gil;
  managed->CopyOut(data, engine.attached().state_device(), out);
  return true;
}

}  // namespace

void Write(Engine& engine, int param, const at::Tensor& rows, int64_t first) {
  const NoGil no_gil;
  const at::Tensor dense = rows.to(at::kCPU).contiguous();
  Check(engine.job().WriteParameter(param, dense.const_data_ptr(), first, dense.numel()));
}

void WriteGradient(Engine& engine, int param, const at::Tensor& rows, int64_t first) {
  const NoGil no_gil;
  const at::Tensor dense = rows.to(at::kCPU, at::kFloat).contiguous();
  Check(engine.job().WriteGradient(param, dense.const_data_ptr(), first, dense.numel()));
}

void WriteOptimizerState(Engine& engine, int param, int state, const at::Tensor& rows, int64_t first) {
  const NoGil no_gil;
  const at::Tensor dense = rows.to(at::kCPU, at::kFloat).contiguous();
  Check(Status::Take(shardd_write_optimizer_state(engine.job().c_job(), param, state, dense.const_data_ptr<float>(),
                                                  first, dense.numel())));
}

void WriteUpdateCount(Engine& engine, int param, int64_t count) {
  const NoGil no_gil;
  Check(Status::Take(shardd_write_update_count(engine.job().c_job(), param, count)));
}

void Commit(Engine& engine) {
  const NoGil no_gil;
  Check(engine.job().CommitParameters());
}

bool CopyFullParameter(Engine& engine, int param, at::Tensor out) {
  return CopyOut(engine, param, engine.job().full_parameter_data(param), out);
}

bool CopyFullGradient(Engine& engine, int param, at::Tensor out) {
  return CopyOut(engine, param, engine.job().full_gradient_data(param), out);
}

bool CopyStored(Engine& engine, int param, int64_t first, at::Tensor out) {
  const shardd_param_info info = engine.job().parameter_info(param);
  const auto* data = static_cast<const char*>(engine.job().shard_data(param));
  if (first < 0 || out.numel() > info.numel || first > info.numel - out.numel() || !out.is_contiguous()) {
    throw py::value_error("copy stored \"" + std::string(info.fqn) + "\": no such elements (got " +
                          std::to_string(out.numel()) + " from " + std::to_string(first) + " on, want within " +
                          std::to_string(info.numel) + ")");
  }
  if (data == nullptr) {
    return false;
  }
  const NoGil no_gil;
  const char* begin = data + first * static_cast<int64_t>(out.element_size());
  if (const at::Device device = engine.attached().state_device(); out.is_cpu() && device.is_cpu()) {
    memcpy(out.mutable_data_ptr(), begin, out.nbytes());
  } else {
    out.copy_(TensorAt(const_cast<char*>(begin), out.sizes(), out.scalar_type(), device));
  }
  return true;
}

py::object StoredState(Engine& engine, int param, int state) {
  void* data = engine.job().optimizer_state_data(param, state);
  if (data == nullptr) {
    return py::none();
  }
  return py::cast(
      TensorAt(data, {engine.job().parameter_info(param).numel}, at::kFloat, engine.attached().state_device()));
}

void AdoptState(Engine& engine, int param, int state, const at::Tensor& local, bool copy_in, bool whole) {
  for (Unit* unit : engine.units()) {
    if (HeldShard* shard = unit->gradients().FindShard(param); shard != nullptr) {
      float* data = nullptr;
      {
        const NoGil no_gil;  // the first call maps the memory of all
        data = static_cast<float*>(engine.job().optimizer_state_data(param, state));
      }
      if (data == nullptr) {
        Check(Status(Code::kResourceExhausted, "keep optimizer state " + std::to_string(state) + " of \"" + shard->fqn +
                                                   "\": the job was opened without memory for it"));
      }
      shard->AdoptState(static_cast<size_t>(state), local, data, whole, copy_in);
      return;
    }
  }
}

void SetUpdated(Engine& engine, const std::vector<int>& params) {
  const std::unordered_set<int> updated(params.begin(), params.end());
  for (const Unit* unit : engine.units()) {
    for (const auto& shard : unit->gradients().shards()) {
      shard->updated = updated.count(shard->daemon_param) > 0;
    }
  }
}

void SettleGradients(Engine& engine) {
  for (Unit* unit : engine.units()) {
    unit->gradients().HideOwn();
    unit->gradients().Settle(UnitGradients::For::kOther);
    if (!engine.full_params()) {
      unit->gradients().ShowOwn();
    }
  }
}

void TakeGradient(Engine& engine, int param) {
  if (const std::shared_ptr<ManagedParam> managed = engine.FindManaged(param); managed != nullptr) {
    managed->HideOwnGradient();
    managed->TakeGradient(engine.steps());
    managed->ShowOwnGradient();
  }
}

bool HasGradient(Engine& engine, int param) {
  const std::shared_ptr<ManagedParam> managed = engine.FindManaged(param);
  return managed != nullptr && managed->in_job;
}

}  // namespace shardd::python
