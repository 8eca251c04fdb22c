#ifndef SHARDD_CLIENT_C_JOB_HAND_INS_H_
#define SHARDD_CLIENT_C_JOB_HAND_INS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "client/c/attachment/attachment.h"

namespace shardd {

// Owns the rank's leave to change the shards that all ranks see: whether it has asked the daemon, and has it, to hand
// in its edits. With pass_copies a rank asks only where it leaves full parameters, and waits until the others have left
// them, too. Thread-compatible.
class HandIns {
 public:
  explicit HandIns(Attachment& attachment) : attachment_(attachment) {}
  // Begins a new session.
  void Reset();

  // True from the daemon's leave to the rank's next pass or step: nobody reads.
  bool granted() const { return granted_; }
  // True while a request is sent and not granted: a wait that was interrupted can go on.
  bool requested() const { return requested_; }

  // REQUIRES: !requested().
  absl::Status Request(const WaitFor& reason);
  // Waits until the daemon grants the request. REQUIRES: requested().
  absl::Status Await(const WaitFor& reason);
  // Waits until the daemon grants the request of FullParams::Leave. Returns OK if there is none.
  absl::Status AwaitOthersLeave();
  // The rank enters a pass, or ends its step: the daemon may read what was handed in.
  void End() { granted_ = false; }

 private:
  Attachment& attachment_;
  uint64_t requests_ = 0;  // in this session
  bool requested_ = false;
  bool granted_ = false;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_HAND_INS_H_
