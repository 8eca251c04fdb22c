#ifndef SHARDD_CLIENT_C_JOB_PASSES_H_
#define SHARDD_CLIENT_C_JOB_PASSES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/c/attachment/attachment.h"
#include "client/c/attachment/handle_set.h"
#include "client/c/attachment/staging.h"
#include "client/c/job/edit_writeback.h"
#include "client/c/job/edits.h"
#include "client/c/job/gradients.h"
#include "client/c/job/hand_ins.h"

namespace shardd {

// Owns whether the rank is inside a pass, in jobs whose trainers write: all ranks enter together and write between
// passes. The ledger knows which pass is being entered and whether it commits a step. Thread-compatible.
class Passes {
 public:
  Passes(Attachment& attachment, const HandleSet& handles, Staging& staging, Gradients& gradients, HandIns& hand_ins,
         Edits& edits, EditWriteback& writeback)
      : attachment_(attachment),
        handles_(handles),
        staging_(staging),
        gradients_(gradients),
        hand_ins_(hand_ins),
        edits_(edits),
        writeback_(writeback) {}

  // These are calls of the C ABI.
  absl::Status Enter(bool stepped, absl::string_view state);
  absl::Status Leave();
  absl::Status StopReading();
  absl::Status ResumeReading();
  bool inside() const { return inside_; }
  absl::StatusOr<bool> HasEdits();
  absl::Status HandIn();
  absl::Status AwaitStore();

  // Puts the rank outside of any pass, after a step, or for a new session.
  void Reset();
  void BeginSession();
  // Returns OK inside of a pass, if nothing was stored since the rank stopped reading, else FAILED_PRECONDITION. `what`
  // names the call, which reads parameters.
  absl::Status CheckReading(absl::string_view what);

  // Hands in what this rank has stored into its view of the shards, when no rank reads them; nothing if it has stored
  // nothing. `call` is the one that needs it. A wait that was interrupted goes on with the next call.
  absl::Status HandInEdits(const char* call);
  // The rank has sent a step.
  void StepSent() { edits_.StepSent(); }
  // The step that was sent is committed: FAILED_PRECONDITION, also of all later calls, if the rank has stored into
  // shards since it was sent.
  absl::Status StepEnded();

  // Inside, between a forward and what may be its backward.
  bool stopped_reading() const { return inside_ && !reads_; }

 private:
  absl::Status CheckWrites(const char* call) const;
  // Waits until all ranks have entered, and is inside then.
  absl::Status AwaitEntered(const WaitFor& reason);
  // Over nodes: the pass that was just entered is left, and what ranks have stored is to be written back first.
  absl::StatusOr<bool> IsToWriteBack();
  absl::Status WriteBack();
  // Over nodes: an error if this rank has stored what only all ranks together write back, in a call of their own.
  absl::Status CheckNothingToWriteBack(const char* call);
  absl::Status SendEnter(bool stepped, absl::string_view state, const WaitFor& reason);
  absl::Status NotInside(const char* call) const;
  absl::Status SendLeave();
  // FAILED_PRECONDITION where this rank reads in a pass, enters one, or is inside of full parameters.
  absl::Status CheckMayHandIn(const char* call) const;
  // Returns FAILED_PRECONDITION, and makes it the job's failure, if the rank has stored into shards inside the pass.
  absl::Status CheckNotStored();
  absl::Status Fail(absl::string_view stored, absl::string_view why);

  Attachment& attachment_;
  const HandleSet& handles_;
  Staging& staging_;
  Gradients& gradients_;
  HandIns& hand_ins_;
  Edits& edits_;
  EditWriteback& writeback_;
  bool asks_to_store_ = false;  // of all sessions
  bool inside_ = false;
  bool reads_ = false;   // inside, and a store is an error
  std::string written_;  // what a store wrote that has ended the pass; until the next one
  // Over nodes: what the rank has said to have stored where it entered last, and how often in this session it was told
  // that ranks write back.
  std::string said_stored_;
  uint64_t told_to_write_back_ = 0;
  bool to_write_back_ = false;  // and has not yet
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_PASSES_H_
