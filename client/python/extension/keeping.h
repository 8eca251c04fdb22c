#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_KEEPING_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_KEEPING_H_

// Calls from Python that keep the model for as long as they last. A wait holds no GIL, so another thread's garbage
// collector may find a model there that the program has dropped (`del model; optimizer.step()`): it would unbind the
// units, and end the job, that the call is inside of.

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/unit.h"

namespace shardd::python {

template <typename Result, typename... Arguments>
auto Keeping(Result (Engine::*method)(Arguments...)) {
  return [method](Engine& engine, Arguments... arguments) -> Result {
    const std::shared_ptr<PyObject> kept = engine.KeepModel();
    return (engine.*method)(std::forward<Arguments>(arguments)...);
  };
}

template <typename Result, typename... Arguments>
auto Keeping(Result (Unit::*method)(Arguments...)) {
  return [method](Unit& unit, Arguments... arguments) -> Result {
    const std::shared_ptr<PyObject> kept = unit.KeepModel();
    return (unit.*method)(std::forward<Arguments>(arguments)...);
  };
}

// Of functions whose first argument is the engine.
template <typename Result, typename... Arguments>
auto Keeping(Result (*function)(Engine&, Arguments...)) {
  return [function](Engine& engine, Arguments... arguments) -> Result {
    const std::shared_ptr<PyObject> kept = engine.KeepModel();
    return function(engine, std::forward<Arguments>(arguments)...);
  };
}

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_KEEPING_H_
