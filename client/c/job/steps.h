#ifndef SHARDD_CLIENT_C_JOB_STEPS_H_
#define SHARDD_CLIENT_C_JOB_STEPS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/c/attachment/attachment.h"
#include "client/c/attachment/handle_set.h"
#include "client/c/attachment/staging.h"
#include "client/c/job/gradients.h"
#include "client/c/job/hand_ins.h"
#include "client/c/job/passes.h"

namespace shardd {

struct StepResult {
  int64_t committed_step = 0;
  double grad_norm = 0;
  double clip_factor = 1;
  bool skipped = false;
};

// Sends the daemon's optimizer steps, and owns which one was sent last. Thread-compatible.
class Steps {
 public:
  Steps(Attachment& attachment, HandleSet& handles, Staging& staging, Gradients& gradients, HandIns& hand_ins,
        Passes& passes)
      : attachment_(attachment),
        handles_(handles),
        staging_(staging),
        gradients_(gradients),
        hand_ins_(hand_ins),
        passes_(passes) {}
  // Begins a new session.
  void Reset();

  // These are calls of the C ABI. `step.trainer_state` is set from `state`.
  absl::Status Send(v1::Step step, absl::string_view state);
  absl::StatusOr<StepResult> Wait();
  absl::Status Await();

 private:
  absl::Status Check(const v1::Step& step, absl::string_view state) const;
  // Of a step that leaves groups, or goes on. The daemon checks the same, which would cost every rank the step.
  absl::Status CheckParts(const v1::Step& step) const;
  absl::Status CheckNotEdited(bool part);
  // The step commits what its parts have changed, and changes nothing itself.
  bool OnlyCommits(const v1::Step& step) const;
  // FAILED_PRECONDITION: none was sent in this session.
  absl::Status CheckSent(const char* call) const;

  Attachment& attachment_;
  HandleSet& handles_;
  Staging& staging_;
  Gradients& gradients_;
  HandIns& hand_ins_;
  Passes& passes_;
  int64_t last_step_ = -1;  // -1: none in this session
  int64_t parts_ = 0;       // of the running step, that were sent
  int64_t parts_made_ = 0;  // of these, known to be
  uint64_t last_version_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_STEPS_H_
