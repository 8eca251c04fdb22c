#include "client/python/extension/tensors.h"

#include <torch/csrc/autograd/python_variable.h>

#include <utility>

namespace shardd::python {
namespace {

py::object* slow_map_function = nullptr;

bool IsPlainScalar(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
         PyUnicode_CheckExact(value);
}

py::object MapOne(PyObject* value, const TensorFunction& function) {
  const at::Tensor replacement = function(THPVariable_Unpack(value));
  return replacement.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(replacement))
                               : py::reinterpret_borrow<py::object>(value);
}

py::object MapTuple(PyObject* value, const TensorFunction& function) {
  const Py_ssize_t size = PyTuple_GET_SIZE(value);
  py::object copy;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = PyTuple_GET_ITEM(value, i);
    py::object mapped = MapTensors(item, function);
    if (mapped.ptr() == item && !copy) {
      continue;
    }
    if (!copy) {
      copy = py::reinterpret_steal<py::object>(PyTuple_New(size));
      for (Py_ssize_t k = 0; k < i; ++k) {
        PyTuple_SET_ITEM(copy.ptr(), k, Py_NewRef(PyTuple_GET_ITEM(value, k)));
      }
    }
    PyTuple_SET_ITEM(copy.ptr(), i, mapped.release().ptr());
  }
  return copy ? copy : py::reinterpret_borrow<py::object>(value);
}

py::object MapList(PyObject* value, const TensorFunction& function) {
  py::object copy;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
    PyObject* item = PyList_GET_ITEM(value, i);
    py::object mapped = MapTensors(item, function);
    if (mapped.ptr() == item) {
      continue;
    }
    if (!copy) {
      copy = py::reinterpret_steal<py::object>(PyList_GetSlice(value, 0, PyList_GET_SIZE(value)));
    }
    if (PyList_SetItem(copy.ptr(), i, mapped.release().ptr()) != 0) {
      throw py::error_already_set();
    }
  }
  return copy ? copy : py::reinterpret_borrow<py::object>(value);
}

py::object MapDict(PyObject* value, const TensorFunction& function) {
  py::object copy;
  PyObject* key = nullptr;
  PyObject* item = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(value, &position, &key, &item) != 0) {
    py::object mapped = MapTensors(item, function);
    if (mapped.ptr() == item) {
      continue;
    }
    if (!copy) {
      copy = py::reinterpret_steal<py::object>(PyDict_Copy(value));
    }
    if (PyDict_SetItem(copy.ptr(), key, mapped.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
  return copy ? copy : py::reinterpret_borrow<py::object>(value);
}

}  // namespace

c10::StorageImpl* StorageOf(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

void LoseStorage(c10::StorageImpl* storage, const std::string& message) {
  storage->set_data_ptr_noswap(at::DataPtr(nullptr, storage->device()));
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

void SetSlowMap(py::object slow_map) { slow_map_function = new py::object(std::move(slow_map)); }

py::object MapTensors(py::handle handle, const TensorFunction& function) {
  PyObject* value = handle.ptr();
  if (THPVariable_CheckExact(value)) {
    return MapOne(value, function);
  }
  if (PyTuple_CheckExact(value)) {
    return MapTuple(value, function);
  }
  if (PyDict_CheckExact(value)) {
    return MapDict(value, function);
  }
  if (PyList_CheckExact(value)) {
    return MapList(value, function);
  }
  if (IsPlainScalar(value)) {
    return py::reinterpret_borrow<py::object>(value);
  }
  if (THPVariable_Check(value)) {
    return MapOne(value, function);
  }
  if (slow_map_function == nullptr) {
    return py::reinterpret_borrow<py::object>(value);
  }
  const auto call = [&function](py::handle item) { return MapTensors(item, function); };
  return (*slow_map_function)(handle, py::cpp_function(call));
}

}  // namespace shardd::python
