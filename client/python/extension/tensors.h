#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_TENSORS_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_TENSORS_H_

// Tensors inside the arguments and results of modules.

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <string>

namespace shardd::python {

// Returns what takes the tensor's place; an undefined tensor leaves it as it is.
using TensorFunction = std::function<at::Tensor(const at::Tensor&)>;

// `value` with every tensor in it replaced; the same object where nothing was. Looks into tuples, lists and dicts, and,
// through `slow_map` (SetSlowMap), into named tuples, dataclasses and other subclasses of them, in the order in which
// torch's own fully_shard does. Needs the GIL.
pybind11::object MapTensors(pybind11::handle value, const TensorFunction& function);

// `slow_map(value, function)`, in Python, for what is not one of the exact built-in containers.
void SetSlowMap(pybind11::object slow_map);

// The memory behind a tensor. REQUIRES: a dense tensor, with a storage.
c10::StorageImpl* StorageOf(const at::Tensor& tensor);
// Any later use of the storage's tensors raises `message`. What it pointed to is not freed.
void LoseStorage(c10::StorageImpl* storage, const std::string& message);

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_TENSORS_H_
