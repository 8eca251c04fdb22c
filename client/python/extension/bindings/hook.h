#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_BINDINGS_HOOK_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_BINDINGS_HOOK_H_

#include <pybind11/pybind11.h>

namespace shardd::python {

enum class HookKind { kPreForward, kPostForward, kForwardFailed };

// What a module calls: hook(module, args, kwargs) or hook(module, args, output). An object of a type of its own and not
// a pybind11 function: a call costs a tenth. Holds `owner`, the Python unit, so that the garbage collector sees the
// cycle of module, hook and unit.
pybind11::object MakeHook(pybind11::object owner, HookKind kind);
// Before the first MakeHook.
void ReadyHookType();

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_BINDINGS_HOOK_H_
