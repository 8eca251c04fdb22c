#include "client/python/extension/engine/engine.h"

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/python/extension/bindings/bindings.h"
#include "client/python/extension/bindings/facts.h"
#include "client/python/extension/bindings/keeping.h"
#include "client/python/extension/engine/at_exit.h"
#include "client/python/extension/engine/values.h"
#include "client/python/extension/errors.h"

namespace shardd::python {
namespace {

// As shardd_step_options have `left_groups` and `part`.
py::dict StepDict(Engine& engine, const py::list& groups, double max_grad_norm, double loss_scale,
                  const std::string& state, const std::vector<int32_t>& left_groups, bool part) {
  std::vector<shardd_hyperparameters> list;
  for (const py::handle item : groups) {
    const auto group = item.cast<py::dict>();
    shardd_hyperparameters values{};
    const auto number = [&group](const char* key) { return group.contains(key) ? group[key].cast<double>() : 0.0; };
    values.lr = number("lr");
    values.weight_decay = number("weight_decay");
    values.beta1 = number(group.contains("lr_decay")      ? "lr_decay"
                          : group.contains("ns_a")        ? "ns_a"
                          : group.contains("beta2_decay") ? "beta2_decay"
                                                          : "beta1");
    values.beta2 = number(group.contains("alpha")                       ? "alpha"  // what shares a field
                          : group.contains("initial_accumulator_value") ? "initial_accumulator_value"
                          : group.contains("ns_b")                      ? "ns_b"
                          : group.contains("eps2")                      ? "eps2"
                                                                        : "beta2");
    values.eps = number("eps");
    values.momentum = number("momentum");
    values.dampening = number(group.contains("ns_c") ? "ns_c" : group.contains("d") ? "d" : "dampening");
    values.nesterov = number("nesterov") != 0 ? 1 : 0;
    values.ns_steps = static_cast<int16_t>(number("ns_steps"));
    values.adjust_lr = static_cast<int16_t>(number("adjust_lr"));
    list.push_back(values);
  }
  shardd_step_options options{};
  options.groups = list.data();
  options.group_count = static_cast<int32_t>(list.size());
  options.max_grad_norm = max_grad_norm;
  options.loss_scale = loss_scale;
  options.left_groups = left_groups.data();
  options.left_group_count = static_cast<int32_t>(left_groups.size());
  options.part = part ? 1 : 0;
  const AttachedJob::StepResult result = engine.Step(options, state);
  py::dict out;
  out["committed_step"] = result.committed_step;
  out["grad_norm"] = result.grad_norm;
  out["clip_factor"] = result.clip_factor;
  out["skipped"] = result.skipped;
  return out;
}

}  // namespace

void BindEngine(py::module_& m) {
  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def_static("attach",
                  [](const std::string& spec_json, int rank, int node, const std::string& address, bool resumes,
                     int64_t timeout_ms, int gpu, bool alone) {
                    return std::make_shared<Engine>(
                        AttachedJob::Attach(spec_json, rank, node, address, resumes, timeout_ms, gpu, alone));
                  })
      .def("info", Keeping(&InfoDict))
      .def("param_info", &ParamDict)
      .def("flat_param_info", &FlatParamDict)
      .def("shard_pieces", &ShardPieces)
      .def("group_name", [](Engine& engine, int group) { return std::string(engine.job().group(group).info().name); })
      .def("find_param", [](Engine& engine, const std::string& fqn) { return engine.job().FindParameter(fqn); })
      .def("find_group", [](Engine& engine, const std::string& name) { return engine.job().FindGroup(name); })
      .def("write", Keeping(&Write))
      .def("commit", Keeping(&Commit))
      .def(
          "enter_full_params",
          [](Engine& engine, bool writeback, int group, bool recurse, bool rank0_only, bool offload_to_cpu,
             bool with_grads, bool of_shards) {
            const std::shared_ptr<PyObject> kept = engine.KeepModel();
            engine.EnterFullParams({group, recurse, writeback, rank0_only, offload_to_cpu, with_grads}, of_shards);
          },
          py::arg("writeback"), py::kw_only(), py::arg("group") = -1, py::arg("recurse") = true,
          py::arg("rank0_only") = false, py::arg("offload_to_cpu") = false, py::arg("with_grads") = false,
          py::arg("of_shards") = false)
      .def("leave_full_params", Keeping(&Engine::LeaveFullParams))
      .def("copy_full_parameter", Keeping(&CopyFullParameter))
      .def("copy_stored", Keeping(&CopyStored))
      .def("stored_state", &StoredState)
      .def("copy_full_gradient", Keeping(&CopyFullGradient))
      .def("write_gradient", Keeping(&WriteGradient))
      .def("settle_gradients", Keeping(&SettleGradients))
      .def("take_gradient", &TakeGradient)
      .def("has_gradient", &HasGradient)
      .def("shard_range", &RangeDict)
      .def_property_readonly("full_params", &Engine::full_params)
      .def_property_readonly("in_forward_backward", &Engine::in_forward_backward)
      .def("load_memory", &Engine::LoadMemory)
      .def("set_gives_gradients_back", [](Engine& engine, bool given) { engine.used_gradients().SetGivenBack(given); })
      .def("step", Keeping(&StepDict))
      .def("close_step", Keeping(&CloseStep))
      .def_property_readonly("step_is_open", &StepIsOpen)
      .def("set_updated", &SetUpdated)
      .def("reattach", Keeping(&Engine::Reattach))
      .def("extend", Keeping(&Engine::Extend))
      .def("ask_extension", &Engine::AskExtension)
      .def("watch_writes", [](Engine& engine) { Check(engine.job().WatchWrites()); })
      .def("use_passes",
           Keeping(+[](Engine& engine) { engine.passes().Use(engine.attached().info().pass_copies != 0); }))
      .def("synchronise", Keeping(+[](Engine& engine) { engine.attached().SynchroniseStream(); }))
      .def("begin_writing", Keeping(&Engine::BeginWriting))
      .def("await_store", Keeping(&AwaitStore))
      .def("begin_step", [](Engine& engine) { engine.passes().BeginStep(); })
      .def("end_step", [](Engine& engine) { engine.passes().EndStep(); })
      .def("take_changes", Keeping(&Engine::TakeChanges))
      .def("set_replaced",
           [](Engine& engine, py::object replaced) { engine.program().SetReplaced(std::move(replaced)); })
      .def("set_root", [](Engine& engine, py::object root) { engine.program().SetRoot(std::move(root)); })
      .def("has_edits", Keeping(+[](Engine& engine) {
             bool has_edits = false;
             const NoGil no_gil;
             Check(engine.job().HasEdits(&has_edits));
             return has_edits;
           }))
      .def("hand_in", Keeping(+[](Engine& engine) {
             engine.BeginWriting();
             const NoGil no_gil;
             Check(engine.job().HandInEdits());
           }))
      .def("commit_writing", Keeping(&Engine::CommitWriting))
      .def("adopt_state", Keeping(&AdoptState), py::arg("param"), py::arg("state"), py::arg("local"),
           py::arg("copy_in"), py::arg("whole") = false)
      .def("set_update_counts", &Engine::SetUpdateCounts)
      .def("write_optimizer_state", Keeping(&WriteOptimizerState))
      .def("write_update_count", Keeping(&WriteUpdateCount))
      .def("mark_stepped", [](Engine& engine, std::string state) { engine.passes().MarkStepped(std::move(state)); })
      .def("mark_state", [](Engine& engine, std::string state) { engine.passes().MarkState(std::move(state)); })
      .def("lose_memory", &Engine::LoseMemory)
      .def("release", &Engine::Release)
      .def("detach", &Engine::Detach)
      .def("finish_apart", &Engine::FinishApart)
      .def("leave_to_exit", &LeaveToExit, py::arg("name"), py::arg("notes"))
      .def("wait_for_commit", Keeping(+[](Engine& engine) { engine.attached().WaitForCommit(); }))
      .def("describe", Keeping(+[](Engine& engine) { return engine.attached().Describe(); }))
      .def("trainer_state", [](Engine& engine) { return py::bytes(engine.attached().trainer_state()); })
      .def("client_counters",
           [](Engine& engine) {
             const shardd_counters counters = engine.attached().client_counters();
             py::dict out;
             out["commands"] = counters.commands;
             out["doorbells"] = counters.doorbells;
             out["waits"] = counters.waits;
             out["wait_ns"] = counters.wait_ns;
             return out;
           })
      .def("reset_iteration", Keeping(&Engine::ResetIteration))
      .def("set_followed",
           [](Engine& engine, py::object followed) { engine.program().SetFollowed(std::move(followed)); })
      .def("set_complete_partial",
           [](Engine& engine, py::object complete) { engine.program().SetCompletePartial(std::move(complete)); })
      .def_property_readonly("alive", &Engine::alive)
      .def_property_readonly("steps", &Engine::steps);
}

}  // namespace shardd::python
