#ifndef SHARDD_CLIENT_C_JOB_OPTIMIZER_STATE_H_
#define SHARDD_CLIENT_C_JOB_OPTIMIZER_STATE_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "client/c/attachment/attachment.h"
#include "client/c/job/write_watch.h"

namespace shardd {

// Owns what the rank has done to optimizer state outside of steps. A program may read a checkpoint into the daemon's
// state in place before it loads it: from the first such store until the load is committed, this process sees a private
// copy. Thread-compatible.
class OptimizerState {
 public:
  OptimizerState(Attachment& attachment, WriteWatch& watch) : attachment_(attachment), watch_(watch) {}
  // Begins a new session.
  void Reset();

  // Returns state number `state` of a parameter, or null if there is none. The first call maps the slab.
  void* Data(int param, int state);
  // True if Data shows what the daemon has.
  bool IsStored() const { return !attachment_.has_failed() && stored_into_.empty(); }
  // Returns FAILED_PRECONDITION if something was stored in place and not loaded.
  absl::Status CheckStored(const char* call) const;

  // True if `address` lies in state that the daemon's optimizer keeps.
  bool IsDaemons(const void* address) const;
  // Records that this process has stored into it in place, first into `name`.
  bool has_stores() const { return !stored_into_.empty(); }
  void NoteStores(std::string name) { stored_into_ = std::move(name); }

  // Record that elements were sent to the daemon, and that they are committed.
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
