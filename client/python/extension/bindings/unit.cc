#include "client/python/extension/unit.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "client/python/extension/bindings/bindings.h"
#include "client/python/extension/bindings/hook.h"
#include "client/python/extension/bindings/keeping.h"
#include "client/python/extension/managed_param.h"

namespace shardd::python {
namespace {

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
  if (options.contains("rows_in_job")) {
    const auto [rows, row_numel, first, step] =
        options["rows_in_job"].cast<std::tuple<int64_t, int64_t, int64_t, int64_t>>();
    values.rows = {rows, row_numel, first, step};
  }
  if (options.contains("mesh_scale")) {
    values.mesh_scale = options["mesh_scale"].cast<double>();
  }
  values.own_first = options["own_first"].cast<int64_t>();
  values.shows_unsharded = options["shows_unsharded"].cast<bool>();
  values.gathers_itself = options.contains("gathers_itself") && options["gathers_itself"].cast<bool>();
  return values;
}

void AddParam(Unit& unit, const py::dict& options, std::shared_ptr<HeldShard> shard, py::object unsharded,
              const py::list& places, py::object local_gradient) {
  unit.AddParam(std::make_shared<ManagedParam>(ParamOptions(options), std::move(shard), std::move(unsharded),
                                               std::move(local_gradient)),
                Places(places));
}

// The parameter that was added last, as it is stored.
void AddStored(Unit& unit, const py::dict& options, std::shared_ptr<HeldShard> shard, py::object stored) {
  unit.AddStored(
      std::make_shared<ManagedParam>(ParamOptions(options), std::move(shard), std::move(stored), py::none()));
}

// `owner`'s parameter, used by modules of `unit` too.
void BorrowParam(Unit& unit, const Unit& owner, int daemon_param, const py::list& places) {
  unit.shown().Borrow(owner.shown(), daemon_param, Places(places));
}

}  // namespace

void BindHeldShard(py::module_& m) {
  py::class_<HeldShard, std::shared_ptr<HeldShard>>(m, "HeldShard").def(py::init(&MakeShard));
}

void BindUnit(py::module_& m) {
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
      .def_readwrite("_scales_by_mesh", &Unit::scales_by_mesh)
      .def_readwrite("contributes", &Unit::contributes)
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
      .def(
          "_set_gradient_hook",
          [](Unit& unit, py::object hook, bool replaces) {
            unit.replaces_reduction = replaces;
            unit.gradients().SetHook(std::move(hook));
          },
          py::arg("hook"), py::arg("replaces"))
      .def("_bind", &Unit::Bind)
      .def("_add_param", &AddParam)
      .def("_borrow_param", &BorrowParam)
      .def("_set_extension", &Unit::SetExtension)
      .def("_set_unsharded", &Unit::SetUnsharded)
      .def("_unbind", &Unit::Unbind)
      .def("_copy_shards_out", Keeping(+[](Unit& unit) {
             unit.ToSharded();
             unit.gradients().CopyShardsOut();
           }))
      .def("_add_stored", &AddStored)
      .def_property(
          "_full_precision", [](const Unit& unit) { return unit.shown().reads_stored(); }, &Unit::set_full_precision)
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
             const std::shared_ptr<ManagedParam> param = unit.gradients().FindParam(daemon_param);
             return param != nullptr && param->has_own_gradient();
           })
      .def_property_readonly("is_unsharded", [](const Unit& unit) { return unit.shown().unsharded(); })
      .def_property_readonly("is_sharded", [](const Unit& unit) { return !unit.shown().unsharded(); })
      .def_property_readonly("_training", [](const Unit& unit) { return static_cast<int>(unit.life().training()); });
}

}  // namespace shardd::python
