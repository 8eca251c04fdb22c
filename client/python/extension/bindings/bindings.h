#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_BINDINGS_BINDINGS_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_BINDINGS_BINDINGS_H_

// The classes of the module shardd._C, each bound in a file of its own.

#include <pybind11/pybind11.h>

namespace shardd::python {

void BindEngine(pybind11::module_& m);
void BindHeldShard(pybind11::module_& m);
void BindUnit(pybind11::module_& m);

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_BINDINGS_BINDINGS_H_
