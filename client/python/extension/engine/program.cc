#include "client/python/extension/engine/program.h"

namespace shardd::python {

namespace py = pybind11;

namespace {

bool InterpreterEnds() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

}  // namespace

std::shared_ptr<PyObject> Program::KeepModel() const {
  PyObject* const root = root_.is_none() ? Py_None : PyWeakref_GetObject(root_.ptr());
  if (root == Py_None) {
    return nullptr;
  }
  return {Py_NewRef(root), [](PyObject* kept) {
            if (InterpreterEnds()) {
              return;  // who asks for the GIL now ends its thread, which a destructor must not
            }
            const py::gil_scoped_acquire gil;
            Py_DECREF(kept);
          }};
}

void Program::Replaced(py::handle before, py::handle now) const {
  if (!replaced_.is_none()) {
    replaced_(before, now);
  }
}

void Program::Followed() const {
  if (!followed_.is_none()) {
    followed_();
  }
}

py::object Program::CompleteForward(py::object output) const {
  return complete_partial_.is_none() ? std::move(output) : complete_partial_(std::move(output));
}

void Program::CompleteBackward() const {
  if (!complete_partial_.is_none()) {
    complete_partial_(py::ellipsis());
  }
}

void Program::Forget() { root_ = replaced_ = followed_ = complete_partial_ = py::object(); }

}  // namespace shardd::python
