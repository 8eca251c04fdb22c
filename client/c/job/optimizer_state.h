#ifndef SHARDD_CLIENT_C_JOB_OPTIMIZER_STATE_H_
#define SHARDD_CLIENT_C_JOB_OPTIMIZER_STATE_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "client/c/attachment/attachment.h"
#include "client/c/job/write_watch.h"

namespace shardd {

// Owns what the rank has done to the optimizer's state beside its steps. Checkpoints are read into the daemon's state
// in place, and then loaded: from such a store until the commit of what was loaded, this process sees a copy of its
// own. Thread-compatible.
class OptimizerState {
 public:
  OptimizerState(Attachment& attachment, WriteWatch& watch) : attachment_(attachment), watch_(watch) {}
  // As in a new session.
  void Reset();

  // Where state number `state` of a parameter lies. Maps the slab with the first call. Null: there is no such state.
  void* Data(int param, int state);
  // What Data shows is what the daemon has.
  bool IsStored() const { return !attachment_.has_failed() && stored_into_.empty(); }
  // FAILED_PRECONDITION: something was stored into and not loaded.
  absl::Status CheckStored(const char* call) const;

  // The daemon keeps state, and `address` lies in it.
  bool IsDaemons(const void* address) const;
  // This process has stored into it, first into what `name` says.
  bool has_stores() const { return !stored_into_.empty(); }
  void NoteStores(std::string name) { stored_into_ = std::move(name); }

  // Elements of it were sent to the daemon; and those are committed.
  void Loaded() { loaded_ = true; }
  absl::Status Committed();

 private:
  Attachment& attachment_;
  WriteWatch& watch_;
  std::string stored_into_;  // the first of what was
  bool loaded_ = false;      // by the commit that follows
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_OPTIMIZER_STATE_H_
