#ifndef SHARDD_CLIENT_C_JOB_PASSES_H_
#define SHARDD_CLIENT_C_JOB_PASSES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/c/attachment/attachment.h"
#include "client/c/attachment/handle_set.h"
#include "client/c/attachment/staging.h"
#include "client/c/job/edits.h"
#include "client/c/job/gradients.h"
#include "client/c/job/hand_ins.h"

namespace shardd {

// Owns whether the rank is inside a pass, in jobs whose trainers write: all ranks enter together and write between
// passes. The ledger knows which pass is being entered and whether it commits a step. Thread-compatible.
class Passes {
 public:
  Passes(Attachment& attachment, const HandleSet& handles, Staging& staging, Gradients& gradients, HandIns& hand_ins,
         Edits& edits)
      : attachment_(attachment),
        handles_(handles),
        staging_(staging),
        gradients_(gradients),
        hand_ins_(hand_ins),
        edits_(edits) {}

  // These are calls of the C ABI.
  absl::Status Enter(bool stepped, absl::string_view state);
  absl::Status Leave();
  absl::Status Pause();
  absl::Status Resume();
  bool inside() const;
  absl::Status HandIn();

  // Puts the rank outside of any pass, for a new session or after a step.
  void Reset();
  // Ends a pause and returns OK inside of a pass, else FAILED_PRECONDITION. `what` names the call, which reads
  // parameters.
  absl::Status CheckReading(absl::string_view what);

  // Hands in what this rank has stored into its view of the shards, when no rank reads them; nothing if it has stored
  // nothing. `call` is the one that needs it. A wait that was interrupted goes on with the next call.
  absl::Status HandInEdits(const char* call);
  // The rank has sent a step.
  void StepSent() { edits_.StepSent(); }
  // The step that was sent is committed: FAILED_PRECONDITION, also of all later calls, if the rank has stored into
  // shards since it was sent.
  absl::Status StepEnded();

  bool paused() const { return inside_ && paused_; }

 private:
  absl::Status CheckWrites(const char* call) const;
  absl::Status SendEnter(bool stepped, absl::string_view state, const WaitFor& reason);
  absl::Status NotInside(const char* call) const;
  absl::Status SendLeave();
  // Returns false if another rank's edits were handed in meanwhile, which has ended the pass.
  bool EndPause();
  // Leaves the paused pass because of a store into `written`.
  absl::Status LeaveFor(std::string written);
  // Returns FAILED_PRECONDITION, and makes it the job's failure, if the rank has stored into shards inside the pass.
  absl::Status CheckNotStored();
  absl::Status Fail(absl::string_view stored, absl::string_view why);

  Attachment& attachment_;
  const HandleSet& handles_;
  Staging& staging_;
  Gradients& gradients_;
  HandIns& hand_ins_;
  Edits& edits_;
  bool inside_ = false;
  bool paused_ = false;  // inside, and a store may leave it
  std::string written_;  // what such a store wrote; until the next pass
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_PASSES_H_
