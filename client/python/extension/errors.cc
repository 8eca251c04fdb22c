#include "client/python/extension/errors.h"

#include <torch/csrc/Exceptions.h>

#include <utility>

namespace py = pybind11;

namespace shardd::python {
namespace {

// Never freed: it may be used until the interpreter is gone.
py::object* error_factory = nullptr;

// What a signal handler raised inside a wait, until the wait has returned.
struct Raised {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
};
thread_local Raised raised_in_wait;

}  // namespace

void SetErrorFactory(py::object make) { error_factory = new py::object(std::move(make)); }

int PendingSignal(void*) {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) {
    return 0;
  }
  PyErr_Fetch(&raised_in_wait.type, &raised_in_wait.value, &raised_in_wait.traceback);
  return 1;
}

void Check(Status status) {
  if (status.ok()) {
    return;
  }
  const py::gil_scoped_acquire gil;
  if (status.code() == Code::kCancelled && raised_in_wait.type != nullptr) {
    const Raised raised = std::exchange(raised_in_wait, Raised());
    PyErr_Restore(raised.type, raised.value, raised.traceback);
  } else if (error_factory == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, status.message().c_str());
  } else {
    const py::object error = (*error_factory)(static_cast<int>(status.code()), status.message());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  }
  python_error error;
  error.persist();
  throw error;
}

}  // namespace shardd::python
