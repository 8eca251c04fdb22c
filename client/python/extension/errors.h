#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_ERRORS_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_ERRORS_H_

// From the library's statuses to Python exceptions. The classes are Python's own (shardd/errors.py); an exception has
// `code`, google.rpc.Code by number.

#include <pybind11/pybind11.h>

#include "client/cpp/shardd.h"

namespace shardd::python {

namespace py = pybind11;

// `make(code, message)` returns the exception to raise. Called once, when the package is imported.
void SetErrorFactory(pybind11::object make);

// Throws what becomes the Python exception, also out of autograd's nodes, unless `status` is OK. CANCELLED raises what
// the interrupting signal handler raised. Takes the GIL itself.
void Check(Status status);

// For shardd_set_interrupt: runs pending signal handlers; non-zero when one of them raised.
int PendingSignal(void* context);

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_ERRORS_H_
