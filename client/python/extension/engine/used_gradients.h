#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_USED_GRADIENTS_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_USED_GRADIENTS_H_

#include <vector>

#include "client/python/extension/engine/attached_job.h"

namespace shardd::python {

class Unit;

// Memory of gradients that a step has used, and that nobody shows or holds: it goes back to the system where a forward
// begins, and comes back in backward. That costs time, so it is for models whose gradients are many. Owns whether the
// job has such gradients. Needs the GIL.
class UsedGradients {
 public:
  void SetGivenBack(bool given_back) {
    given_back_ = given_back;
    used_ = true;  // they are allocated with the job
  }
  // By a step that is committed, the daemon's or the trainers', and none came since.
  void MarkUsed() { used_ = true; }
  // Some come now, or may.
  void MarkWanted() { used_ = false; }
  void GiveBack(AttachedJob& attached, const std::vector<Unit*>& units);

 private:
  bool given_back_ = false;
  bool used_ = false;
};

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_USED_GRADIENTS_H_
