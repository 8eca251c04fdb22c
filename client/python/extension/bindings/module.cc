// The module shardd._C: what concerns the whole process, and its classes.

#include <malloc.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "client/python/extension/bindings/bindings.h"
#include "client/python/extension/bindings/hook.h"
#include "client/python/extension/errors.h"
#include "client/python/extension/memory.h"
#include "client/python/extension/tensor_pool.h"
#include "client/python/extension/tensors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {
namespace {

// `scalar`'s bytes lie in `buffer`, of the same device, from now on, which lives as long as its storage.
void PlaceIn(const at::Tensor& scalar, const at::Tensor& buffer, int64_t offset_bytes) {
  c10::StorageImpl* storage = scalar.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  char* place = static_cast<char*>(buffer.mutable_data_ptr()) + offset_bytes;
  CopyBytes(place, storage->data(), storage->nbytes(), scalar.device());
  storage->set_data_ptr_noswap(at::DataPtr(
      place, new at::Tensor(buffer), [](void* context) { delete static_cast<at::Tensor*>(context); }, scalar.device()));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  ReadyHookType();
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
  BindEngine(m);
  BindHeldShard(m);
  BindUnit(m);
}

}  // namespace shardd::python
