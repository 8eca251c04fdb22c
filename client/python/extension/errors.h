#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_ERRORS_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_ERRORS_H_

// From the library's statuses to Python exceptions. The classes are Python's own (shardd/errors.py); an exception has
// `code`, google.rpc.Code by number.

#include <pybind11/pybind11.h>

#include <string>

#include "client/cpp/shardd.h"

namespace shardd::python {

namespace py = pybind11;

// `make(code, message)` returns the exception to raise. Called once, when the package is imported.
void SetErrorFactory(pybind11::object make);

// Throws what becomes the Python exception, also out of autograd's nodes, unless `status` is OK. CANCELLED raises what
// the interrupting signal handler raised. Takes the GIL itself.
void Check(Status status);

// Throws an AssertionError likewise: where PyTorch does.
[[noreturn]] void RaiseAssertion(const std::string& message);

// For shardd_set_interrupt: runs pending signal handlers; non-zero when one of them raised, or in EndWaits.
int PendingSignal(void* context);

// A call that may wait is under way.
class Waiting {
 public:
  Waiting();
  ~Waiting();
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
};

// While it lives, waits of this thread ask for no signals and go on through EndWaits; they must not need the GIL.
class Undisturbed {
 public:
  Undisturbed();
  ~Undisturbed();
  Undisturbed(const Undisturbed&) = delete;
  Undisturbed& operator=(const Undisturbed&) = delete;
};

// The same as Waiting, without the GIL. REQUIRES: the GIL is held.
class NoGil {
 public:
  NoGil() = default;

 private:
  const Waiting waiting_;
  const pybind11::gil_scoped_release release_;
};

// At the end of the interpreter: waits of other threads end with an error, because they could not take the GIL any
// more. False: one of them has not ended within a second. REQUIRES: the GIL is held.
bool EndWaits();

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_ERRORS_H_
