#ifndef SHARDD_CLIENT_C_JOB_WINDOWS_H_
#define SHARDD_CLIENT_C_JOB_WINDOWS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "client/c/attachment/attachment.h"

namespace shardd {

// Owns the rank's write window: the requests for one that it has sent, and whether stores into its shards reach them.
// With pass_copies a request asks only for the other ranks to be outside of full parameters. Thread-compatible.
class Windows {
 public:
  explicit Windows(Attachment& attachment) : attachment_(attachment) {}
  // As in a new session.
  void Reset();

  bool open() const { return open_; }
  // A request is sent; an interrupted wait for it goes on.
  bool requested() const { return requested_; }

  // REQUIRES: !requested().
  absl::Status Request(const WaitFor& reason);
  // Until the daemon grants what was requested, and opens the window. REQUIRES: requested().
  absl::Status Open(const WaitFor& reason);
  // Until the daemon grants what LeaveFullParams has requested, whichever call goes on with it. OK where nothing was.
  absl::Status AwaitOthersLeave();
  // Before the daemon may read what was stored: from now on stores fault.
  void Close();

 private:
  Attachment& attachment_;
  uint64_t requests_ = 0;  // in this session
  bool requested_ = false;
  bool open_ = false;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_WINDOWS_H_
