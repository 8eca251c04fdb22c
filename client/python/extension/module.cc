// The module shardd._C. Hooks are objects of their own type and not pybind11 functions: a call costs a tenth.

#include <malloc.h>
#include <string.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_arg_parser.h>

#include <utility>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/errors.h"
#include "client/python/extension/facts.h"
#include "client/python/extension/keeping.h"
#include "client/python/extension/managed_param.h"
#include "client/python/extension/memory.h"
#include "client/python/extension/tensor_pool.h"
#include "client/python/extension/tensors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {
namespace {

enum class HookKind { kPreForward, kPostForward, kForwardFailed };

// hook(module, args, kwargs) or hook(module, args, output). Holds the Python unit, so that the garbage collector sees
// the cycle of module, hook and unit.
struct Hook {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* owner;
  Unit* unit;
  HookKind kind;
};

PyObject* CallHook(PyObject* self, PyObject* const* args, size_t flagged_count, PyObject*) {
  auto* hook = reinterpret_cast<Hook*>(self);
  if (PyVectorcall_NARGS(flagged_count) != 3) {
    PyErr_SetString(PyExc_TypeError, "call shardd hook: wrong number of arguments (want 3)");
    return nullptr;
  }
  HANDLE_TH_ERRORS
  try {
    const std::shared_ptr<PyObject> kept = hook->unit->KeepModel();
    py::object result;
    if (hook->kind == HookKind::kPreForward) {
      result = hook->unit->PreForward(args[1], args[2]);
    } else if (hook->kind == HookKind::kPostForward) {
      result = hook->unit->PostForward(args[2]);
    } else {
      hook->unit->ForwardFailed();  // unless its end has been seen
      result = py::none();
    }
    return result.release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
  END_HANDLE_TH_ERRORS
}

int TraverseHook(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<Hook*>(self)->owner);
  return 0;
}

int ClearHook(PyObject* self) {
  Py_CLEAR(reinterpret_cast<Hook*>(self)->owner);
  return 0;
}

void FreeHook(PyObject* self) {
  PyObject_GC_UnTrack(self);
  ClearHook(self);
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject* HookType() {
  static PyTypeObject type = [] {
    PyTypeObject t{};
    Py_SET_REFCNT(reinterpret_cast<PyObject*>(&t), 1);
    t.tp_name = "shardd._C.Hook";
    t.tp_basicsize = sizeof(Hook);
    t.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
    t.tp_vectorcall_offset = offsetof(Hook, vectorcall);
    t.tp_call = PyVectorcall_Call;
    t.tp_traverse = TraverseHook;
    t.tp_clear = ClearHook;
    t.tp_dealloc = FreeHook;
    t.tp_free = PyObject_GC_Del;
    return t;
  }();
  return &type;
}

py::object MakeHook(py::object owner, HookKind kind) {
  Unit* unit = owner.cast<Unit*>();
  Hook* hook = PyObject_GC_New(Hook, HookType());
  if (hook == nullptr) {
    throw py::error_already_set();
  }
  hook->vectorcall = CallHook;
  hook->owner = owner.release().ptr();
  hook->unit = unit;
  hook->kind = kind;
  PyObject_GC_Track(reinterpret_cast<PyObject*>(hook));
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(hook));
}

at::ScalarType ScalarTypeOf(py::handle dtype) { return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type; }

std::vector<Place> Places(const py::list& places) {
  std::vector<Place> list;
  for (const py::handle item : places) {
    const auto place = item.cast<py::tuple>();
    list.push_back({place[0], place[1], place[2]});
  }
  return list;
}

std::shared_ptr<HeldShard> MakeShard(const py::dict& options, py::object sharded, const at::Tensor& local,
                                     py::object make_gradient) {
  HeldShard::Options values;
  values.fqn = options["fqn"].cast<std::string>();
  values.daemon_param = options["daemon_param"].cast<int>();
  values.first_element = options["first_element"].cast<int64_t>();
  values.trainable = options["trainable"].cast<bool>();
  if (options.contains("gradient_dtype")) {
    values.gradient_dtype = ScalarTypeOf(options["gradient_dtype"]);
  }
  if (options.contains("padding")) {
    values.padding = options["padding"].cast<std::vector<std::pair<int64_t, int64_t>>>();
    values.own_numel = options["own_numel"].cast<int64_t>();
  }
  if (options.contains("whole")) {
    values.whole = options["whole"].cast<bool>();
  }
  return std::make_shared<HeldShard>(std::move(values), std::move(sharded), local, std::move(make_gradient));
}

ManagedParam::Options ParamOptions(const py::dict& options) {
  ManagedParam::Options values;
  values.fqn = options["fqn"].cast<std::string>();
  values.daemon_param = options["daemon_param"].cast<int>();
  values.unit_group = options["unit_group"].cast<size_t>();
  values.index_in_group = options["index_in_group"].cast<int>();
  values.trainable = options["trainable"].cast<bool>();
  if (options.contains("shard_dim")) {
    values.shard_dim = options["shard_dim"].cast<int64_t>();
    values.shard_parts = options["shard_parts"].cast<int64_t>();
  }
  values.own_first = options["own_first"].cast<int64_t>();
  values.shows_unsharded = options["shows_unsharded"].cast<bool>();
  return values;
}

void AddParam(Unit& unit, const py::dict& options, std::shared_ptr<HeldShard> shard, py::object unsharded,
              const py::list& places) {
  unit.AddParam(std::make_shared<ManagedParam>(ParamOptions(options), std::move(shard), std::move(unsharded)),
                Places(places));
}

// The parameter that was added last, as it is stored.
void AddStored(Unit& unit, const py::dict& options, std::shared_ptr<HeldShard> shard, py::object stored) {
  unit.AddStored(std::make_shared<ManagedParam>(ParamOptions(options), std::move(shard), std::move(stored)));
}

// `owner`'s parameter, used by modules of `unit` too.
void BorrowParam(Unit& unit, const Unit& owner, int daemon_param, const py::list& places) {
  unit.BorrowParam(owner, daemon_param, Places(places));
}

py::dict StepDict(Engine& engine, const py::list& groups, double max_grad_norm, double loss_scale,
                  const std::string& state) {
  std::vector<shardd_hyperparameters> list;
  for (const py::handle item : groups) {
    const auto group = item.cast<py::dict>();
    shardd_hyperparameters values{};
    const auto number = [&group](const char* key) { return group.contains(key) ? group[key].cast<double>() : 0.0; };
    values.lr = number("lr");
    values.weight_decay = number("weight_decay");
    values.beta1 = number("beta1");
    values.beta2 = number("beta2");
    values.eps = number("eps");
    values.momentum = number("momentum");
    values.dampening = number("dampening");
    values.nesterov = number("nesterov") != 0 ? 1 : 0;
    list.push_back(values);
  }
  shardd_step_options options{};
  options.groups = list.data();
  options.group_count = static_cast<int32_t>(list.size());
  options.max_grad_norm = max_grad_norm;
  options.loss_scale = loss_scale;
  const Engine::StepResult result = engine.Step(options, state);
  py::dict out;
  out["committed_step"] = result.committed_step;
  out["grad_norm"] = result.grad_norm;
  out["clip_factor"] = result.clip_factor;
  out["skipped"] = result.skipped;
  return out;
}

// `scalar`'s bytes lie in `buffer`, of the same device, from now on, which lives as long as its storage.
void PlaceIn(const at::Tensor& scalar, const at::Tensor& buffer, int64_t offset_bytes) {
  c10::StorageImpl* storage = scalar.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  char* place = static_cast<char*>(buffer.mutable_data_ptr()) + offset_bytes;
  CopyBytes(place, storage->data(), storage->nbytes(), scalar.device());
  storage->set_data_ptr_noswap(at::DataPtr(
      place, new at::Tensor(buffer), [](void* context) { delete static_cast<at::Tensor*>(context); }, scalar.device()));
}

// Elements [first, first + out.numel()) of the parameter as stored, at any time: that they do not change meanwhile is
// the caller's to arrange. False: the job's memory is not there. REQUIRES: out is contiguous and of the stored dtype.
bool CopyStored(Engine& engine, int param, int64_t first, at::Tensor out) {
  const shardd_param_info info = engine.job().parameter_info(param);
  const auto* data = static_cast<const char*>(shardd_stored_parameter_data(engine.job().c_job(), param));
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
  if (out.is_cpu() && engine.state_device().is_cpu()) {
    memcpy(out.mutable_data_ptr(), begin, out.nbytes());
  } else {
    out.copy_(TensorAt(const_cast<char*>(begin), out.sizes(), out.scalar_type(), engine.state_device()));
  }
  return true;
}

// fp32 state of the whole parameter where it lies, one-dimensional: valid while attached, and not to be written. None:
// the job has no such state, or this process has stored values over it.
py::object StoredState(Engine& engine, int param, int state) {
  const shardd_param_info info = engine.job().parameter_info(param);
  void* data = shardd_optimizer_state_data(engine.job().c_job(), param, state);
  if (data == nullptr) {
    return py::none();
  }
  return py::cast(TensorAt(data, {info.numel}, at::kFloat, engine.state_device()));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  if (PyType_Ready(HookType()) < 0) {
    throw py::error_already_set();
  }
  m.def("version", [] { return std::string(shardd_version()); });
  m.def("set_error_factory", &SetErrorFactory);
  m.def("end_waits", &EndWaits);
  m.def("set_slow_map", &SetSlowMap);
  m.def("set_inference_check", &SetInferenceCheck);
  m.def("set_move_inputs", &SetMoveInputs);
  m.def("place_in", &PlaceIn);
  // The allocator gives back what lies between blocks in use too; it would otherwise keep it for later.
  m.def(
      "return_freed_memory", [] { malloc_trim(0); }, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("use_tensor_pool", &UseTensorPool);
  m.def("tensor_pool_facts", [] {
    const TensorPool::Facts facts = TensorPoolFacts();
    py::dict out;
    out["used_bytes"] = facts.used_bytes;
    out["resident_bytes"] = facts.resident_bytes;
    out["pages_given_back"] = facts.pages_given_back;
    return out;
  });
  m.def("describe_daemon", [](int64_t timeout_ms) {
    char* json = nullptr;
    Status status;
    {
      const NoGil no_gil;
      status = Status::Take(shardd_describe_daemon(nullptr, timeout_ms, &json));
    }
    Check(status);
    std::string text = json;
    shardd_string_free(json);
    return text;
  });
  m.def("plan_json", [](const std::string& spec) {
    char* json = nullptr;
    Check(Status::Take(shardd_plan_json(spec.c_str(), &json)));
    std::string text = json;
    shardd_string_free(json);
    return text;
  });

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def_static("attach", &Engine::Attach)
      .def("info", Keeping(&InfoDict))
      .def("param_info", &ParamDict)
      .def("find_param", &Engine::FindParam)
      .def("find_group", &Engine::FindGroup)
      .def("write", Keeping(&Engine::Write))
      .def("commit", Keeping(&Engine::Commit))
      .def(
          "enter_full_params",
          [](Engine& engine, bool writeback, int group, bool recurse, bool rank0_only, bool offload_to_cpu,
             bool with_grads) {
            const std::shared_ptr<PyObject> kept = engine.KeepModel();
            engine.EnterFullParams({group, recurse, writeback, rank0_only, offload_to_cpu, with_grads});
          },
          py::arg("writeback"), py::kw_only(), py::arg("group") = -1, py::arg("recurse") = true,
          py::arg("rank0_only") = false, py::arg("offload_to_cpu") = false, py::arg("with_grads") = false)
      .def("leave_full_params", Keeping(&Engine::LeaveFullParams))
      .def("copy_full_parameter", Keeping(&Engine::CopyFullParameter))
      .def("copy_stored", Keeping(&CopyStored))
      .def("stored_state", &StoredState)
      .def("copy_full_gradient", Keeping(&Engine::CopyFullGradient))
      .def("write_gradient", Keeping(&Engine::WriteGradient))
      .def("settle_gradients", Keeping(&Engine::SettleGradients))
      .def("take_gradient", &Engine::TakeGradient)
      .def("has_gradient", &Engine::HasGradient)
      .def("shard_range", &RangeDict)
      .def_property_readonly("full_params", &Engine::full_params)
      .def_property_readonly("in_forward_backward", &Engine::in_forward_backward)
      .def("load_memory", &Engine::LoadMemory)
      .def("set_gives_gradients_back", &Engine::SetGivesGradientsBack)
      .def("step", Keeping(&StepDict))
      .def("set_updated", &Engine::SetUpdated)
      .def("reattach", Keeping(&Engine::Reattach))
      .def("extend", Keeping(&Engine::Extend))
      .def("ask_extension", &Engine::AskExtension)
      .def("watch_writes", &Engine::WatchWrites)
      .def("use_passes", Keeping(&Engine::UsePasses))
      .def("synchronise", Keeping(+[](Engine& engine) { engine.SynchroniseStream(); }))
      .def("open_window", Keeping(&Engine::OpenWindow))
      .def("take_changes", Keeping(&Engine::TakeChanges))
      .def("set_replaced", &Engine::SetReplaced)
      .def("set_root", &Engine::SetRoot)
      .def("hand_in",
           [](Engine& engine) {
             const NoGil no_gil;
             Check(engine.job().OpenWindow());
           })
      .def("close_window", Keeping(&Engine::CloseWindow))
      .def("adopt_state", Keeping(&Engine::AdoptState))
      .def("set_update_counts", &Engine::SetUpdateCounts)
      .def("write_optimizer_state", Keeping(&Engine::WriteOptimizerState))
      .def("write_update_count", Keeping(&Engine::WriteUpdateCount))
      .def("mark_stepped", &Engine::MarkStepped)
      .def("mark_state", &Engine::MarkState)
      .def("lose_memory", &Engine::LoseMemory)
      .def("release", &Engine::Release)
      .def("detach", &Engine::Detach)
      .def("finish_apart", &Engine::FinishApart)
      .def("wait_for_commit", Keeping(&Engine::WaitForCommit))
      .def("describe", Keeping(&Engine::Describe))
      .def("trainer_state", [](Engine& engine) { return py::bytes(engine.trainer_state()); })
      .def("client_counters",
           [](Engine& engine) {
             const shardd_counters counters = engine.client_counters();
             py::dict out;
             out["commands"] = counters.commands;
             out["doorbells"] = counters.doorbells;
             out["waits"] = counters.waits;
             out["wait_ns"] = counters.wait_ns;
             return out;
           })
      .def("reset_iteration", Keeping(&Engine::ResetIteration))
      .def("set_complete_partial", &Engine::SetCompletePartial)
      .def_property_readonly("alive", &Engine::alive)
      .def_property_readonly("steps", &Engine::steps);

  py::class_<HeldShard, std::shared_ptr<HeldShard>>(m, "HeldShard").def(py::init(&MakeShard));

  // No dynamic_attr: with Python 3.11 a subclass's dictionary would be visited twice, and the garbage collector take
  // what it holds for referenced from outside.
  py::class_<Unit, std::shared_ptr<Unit>>(m, "Unit")
      .def(py::init<>())
      .def_readwrite("reduce_grads", &Unit::reduce_grads)
      .def_readwrite("all_reduce_grads", &Unit::all_reduce_grads)
      .def_readwrite("_hybrid", &Unit::hybrid)
      .def_readwrite("reshard_after_backward", &Unit::reshard_after_backward)
      .def_readwrite("unshard_in_backward", &Unit::unshard_in_backward)
      .def_readwrite("reduce_scatter_unused_params", &Unit::reduce_scatter_unused_params)
      .def_readwrite("completes_gradients", &Unit::completes_gradients)
      .def_readwrite("_reshard_after_forward", &Unit::reshard_after_forward)
      .def_readwrite("_shows_shards", &Unit::shows_shards)
      .def_readwrite("_gradient_scale", &Unit::gradient_scale)
      .def("_set_casts",
           [](Unit& unit, py::object param_dtype, py::object output_dtype) {
             unit.cast_inputs = !param_dtype.is_none();
             unit.cast_outputs = !output_dtype.is_none();
             if (unit.cast_inputs) {
               unit.param_dtype = ScalarTypeOf(param_dtype);
             }
             if (unit.cast_outputs) {
               unit.output_dtype = ScalarTypeOf(output_dtype);
             }
           })
      .def("_set_lazy_init", &Unit::SetLazyInit)
      .def("_bind", &Unit::Bind)
      .def("_add_param", &AddParam)
      .def("_borrow_param", &BorrowParam)
      .def("_unbind", &Unit::Unbind)
      .def("_copy_shards_out", Keeping(&Unit::CopyShardsOut))
      .def("_add_stored", &AddStored)
      .def_property("_full_precision", &Unit::full_precision, &Unit::set_full_precision)
      .def_property_readonly("_bound", &Unit::bound)
      .def("_pre_forward_hook", [](py::object self) { return MakeHook(std::move(self), HookKind::kPreForward); })
      .def("_forward_failed_hook", [](py::object self) { return MakeHook(std::move(self), HookKind::kForwardFailed); })
      .def("_post_forward_hook", [](py::object self) { return MakeHook(std::move(self), HookKind::kPostForward); })
      .def("_pre_forward", Keeping(&Unit::PreForward))
      .def("_post_forward", Keeping(&Unit::PostForward))
      .def("_cast_output", &Unit::CastOutput)
      .def("_unshard", Keeping(&Unit::Unshard))
      .def("_request_unshard", Keeping(&Unit::RequestUnshard))
      .def("_wait_for_unshard", Keeping(&Unit::WaitForUnshard))
      .def("reshard", Keeping(&Unit::ReshardByHand))
      .def("_to_sharded", Keeping(&Unit::ToSharded))
      .def("_has_own_gradient",
           [](const Unit& unit, int daemon_param) {
             const std::shared_ptr<ManagedParam> param = unit.FindParam(daemon_param);
             return param != nullptr && param->has_own_gradient();
           })
      .def_property_readonly("is_unsharded", &Unit::unsharded)
      .def_property_readonly("is_sharded", [](const Unit& unit) { return !unit.unsharded(); })
      .def_property_readonly("_training", [](const Unit& unit) { return static_cast<int>(unit.group_training()); });
}

}  // namespace shardd::python
