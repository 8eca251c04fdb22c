#include "client/python/extension/errors.h"

#include <torch/csrc/Exceptions.h>

#include <atomic>
#include <chrono>
#include <thread>
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

thread_local bool undisturbed = false;

std::atomic<int> waits_under_way{0};
std::atomic<bool> waits_end{false};
constexpr auto kEndOfWaits = std::chrono::seconds(1);
constexpr auto kPoll = std::chrono::milliseconds(2);

}  // namespace

void SetErrorFactory(py::object make) { error_factory = new py::object(std::move(make)); }

Waiting::Waiting() { waits_under_way.fetch_add(1); }
Waiting::~Waiting() { waits_under_way.fetch_sub(1); }

Undisturbed::Undisturbed() { undisturbed = true; }
Undisturbed::~Undisturbed() { undisturbed = false; }

bool EndWaits() {
  const py::gil_scoped_release no_gil;
  waits_end = true;
  const auto deadline = std::chrono::steady_clock::now() + kEndOfWaits;
  while (waits_under_way > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kPoll);
  }
  waits_end = false;
  return waits_under_way == 0;
}

int PendingSignal(void*) {
  if (undisturbed) {
    return 0;
  }
  if (waits_end) {
    return 1;
  }
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) {
    return 0;
  }
  PyErr_Fetch(&raised_in_wait.type, &raised_in_wait.value, &raised_in_wait.traceback);
  return 1;
}

void RaiseAssertion(const std::string& message) {
  const py::gil_scoped_acquire gil;
  PyErr_SetString(PyExc_AssertionError, message.c_str());
  python_error error;
  error.persist();
  throw error;
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
