// How an engine ends: given up by this rank, gone with the model, or in a forked child.

#include <unistd.h>

#include <exception>
#include <memory>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {

void Engine::LoseMemory() {
  iteration_.EndGraphs();
  lost_ = true;
  for (Unit* unit : units_) {
    unit->shown().LoseMemory();
  }
}

void Engine::Release() {
  open_step_.reset();  // the program keeps what its parts have made
  try {
    Check(passes_.Leave());  // of a forward that had no backward
  } catch (...) {
    // It was over already, as Finish will say.
  }
  ReleaseUnits();
}

void Engine::ReleaseUnits() {
  iteration_.EndGraphs();
  try {
    attached_->FollowStream();  // what is copied out is behind what the job's stream waits for
  } catch (...) {
    // The session is over, and waits for nothing.
  }
  const std::vector<Unit*> units = units_;  // each takes itself out
  for (Unit* unit : units) {
    unit->Unbind();
  }
  released_ = true;
  attached_->SynchroniseStream();
}

void Engine::Detach(bool finished) {
  if (!attached_->open()) {
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
  std::unique_ptr<Job> job = attached_->Take();
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
  const std::unique_ptr<Job> job = attached_->Take();
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
