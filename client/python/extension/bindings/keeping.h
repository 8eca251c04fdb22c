#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_BINDINGS_KEEPING_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_BINDINGS_KEEPING_H_

// Calls from Python that keep the model for as long as they last. A wait holds no GIL, so another thread's garbage
// collector may find a model there that the program has dropped (`del model; optimizer.step()`): it would unbind the
// units, and end the job, that the call is inside of.

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace shardd::python {

// A method of the engine or of a unit, or a function whose first argument is one.
template <typename Result, typename Owner, typename... Arguments>
auto Keeping(Result (Owner::*method)(Arguments...)) {
  return [method](Owner& owner, Arguments... arguments) -> Result {
    const std::shared_ptr<PyObject> kept = owner.KeepModel();
    return (owner.*method)(std::forward<Arguments>(arguments)...);
  };
}

template <typename Result, typename Owner, typename... Arguments>
auto Keeping(Result (*function)(Owner&, Arguments...)) {
  return [function](Owner& owner, Arguments... arguments) -> Result {
    const std::shared_ptr<PyObject> kept = owner.KeepModel();
    return function(owner, std::forward<Arguments>(arguments)...);
  };
}

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_BINDINGS_KEEPING_H_
