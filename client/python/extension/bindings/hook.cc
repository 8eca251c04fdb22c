#include "client/python/extension/bindings/hook.h"

#include <torch/csrc/Exceptions.h>

#include <memory>

#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {
namespace {

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

}  // namespace

void ReadyHookType() {
  if (PyType_Ready(HookType()) < 0) {
    throw py::error_already_set();
  }
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

}  // namespace shardd::python
