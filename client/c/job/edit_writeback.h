#ifndef SHARDD_CLIENT_C_JOB_EDIT_WRITEBACK_H_
#define SHARDD_CLIENT_C_JOB_EDIT_WRITEBACK_H_

#include "absl/status/status.h"
#include "client/c/job/edits.h"
#include "client/c/job/full_params.h"
#include "client/c/job/values.h"

namespace shardd {

// Over several nodes: makes one version of what all ranks of all nodes have stored into private views of their shards,
// as of full parameters that they write back. Owns how far this rank has come. Thread-compatible.
class EditWriteback {
 public:
  EditWriteback(Edits& edits, FullParams& full_params, Values& values)
      : edits_(edits), full_params_(full_params), values_(values) {}
  // Begins a new session.
  void Reset() { next_ = Next::kNone; }

  // A call of Run has failed, perhaps because its wait was interrupted, and another goes on from there.
  bool under_way() const { return next_ != Next::kNone; }
  // Returns when the version is there. All ranks of all nodes call it, outside of passes.
  absl::Status Run();

 private:
  enum class Next { kNone, kEnter, kCommit, kLeave };

  Edits& edits_;
  FullParams& full_params_;
  Values& values_;
  Next next_ = Next::kNone;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_EDIT_WRITEBACK_H_
