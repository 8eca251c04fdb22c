// How an engine ends: given up by this rank, gone with the model, or in a forked child.

#include <unistd.h>

#include <exception>
#include <utility>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {
namespace {

bool InterpreterEnds() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

}  // namespace

std::shared_ptr<PyObject> Engine::KeepModel() const {
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

void Engine::LoseMemory() {
  ++generation_;
  lost_ = true;
  for (Unit* unit : units_) {
    unit->LoseMemory();
  }
}

void Engine::Release() {
  try {
    LeavePass();  // of a forward that had no backward
  } catch (...) {
    // It was over already, as Finish will say.
  }
  ReleaseUnits();
}

void Engine::ReleaseUnits() {
  ++generation_;
  if (!device_.is_cpu()) {
    try {
      FollowStream();  // what is copied out is behind what the job's stream waits for
    } catch (...) {
      // The session is over, and waits for nothing.
    }
  }
  const std::vector<Unit*> units = units_;  // each takes itself out
  for (Unit* unit : units) {
    unit->Unbind();
  }
  released_ = true;
  SynchroniseStream();
}

void Engine::Detach(bool finished) {
  if (job_ == nullptr) {
    return;
  }
  std::exception_ptr failure;
  if (!released_) {
    try {
      finished ? Release() : ReleaseUnits();
    } catch (...) {
      failure = std::current_exception();  // the others are told all the same
    }
  }
  std::unique_ptr<Job> job = std::move(job_);
  {
    const NoGil no_gil;
    if (finished) {
      Check(job->Finish());
    }
    job.reset();
  }
  if (failure != nullptr) {
    std::rethrow_exception(failure);
  }
}

void Engine::FinishApart() {
  const std::unique_ptr<Job> job = std::move(job_);
  if (job != nullptr) {
    const py::gil_scoped_release no_gil;
    const Undisturbed undisturbed;
    (void)job->Finish();  // it was over already, or nobody came
    while (Py_IsInitialized() == 0) {
      pause();  // the process ends, and there is no interpreter to go back to
    }
  }
}

}  // namespace shardd::python
