#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_PROGRAM_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_PROGRAM_H_

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace shardd::python {

// What an engine knows of the program: the model's root, and functions that it calls. Owns references to them. Needs
// the GIL.
class Program {
 public:
  // `root`: a weakref to the model's root.
  void SetRoot(pybind11::object root) { root_ = std::move(root); }
  // `replaced(before, now)` is called when `now` has taken a parameter's place.
  void SetReplaced(pybind11::object replaced) { replaced_ = std::move(replaced); }
  // `followed()` is called when the job goes on at another daemon, in other memory.
  void SetFollowed(pybind11::object followed) { followed_ = std::move(followed); }
  // `complete(output)` is called with the root's output, and gives what takes its place; after a backward with `...`.
  void SetCompletePartial(pybind11::object complete) { complete_partial_ = std::move(complete); }

  // While what this returns lives, no collector takes the model, its units and the job apart: of another thread, in a
  // wait that holds no GIL, or of this one, in a hook of the program's. Null: the model is gone. Where the result is
  // let go the GIL need not be held.
  std::shared_ptr<PyObject> KeepModel() const;
  void Replaced(pybind11::handle before, pybind11::handle now) const;
  void Followed() const;
  pybind11::object CompleteForward(pybind11::object output) const;
  void CompleteBackward() const;
  // Lets all of it go.
  void Forget();

 private:
  pybind11::object root_ = pybind11::none();
  pybind11::object replaced_ = pybind11::none();  // none: nothing to call
  pybind11::object followed_ = pybind11::none();  // none: nothing to call
  pybind11::object complete_partial_ = pybind11::none();
};

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_PROGRAM_H_
