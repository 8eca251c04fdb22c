#ifndef SHARDD_CLIENT_C_JOB_WINDOWS_H_
#define SHARDD_CLIENT_C_JOB_WINDOWS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "client/c/attachment/attachment.h"

namespace shardd {

// Owns the rank's write window: how many it has requested, and whether stores reach the shards. With pass_copies a
// request only waits until the other ranks are outside of full parameters. Thread-compatible.
class Windows {
 public:
  explicit Windows(Attachment& attachment) : attachment_(attachment) {}
  // Begins a new session.
  void Reset();

  bool open() const { return open_; }
  // True while a request is sent and not granted: a wait that was interrupted can go on.
  bool requested() const { return requested_; }

  // REQUIRES: !requested().
  absl::Status Request(const WaitFor& reason);
  // Waits until the daemon grants the request, then lets stores reach the shards. REQUIRES: requested().
  absl::Status Open(const WaitFor& reason);
  // Waits until the daemon grants the request of FullParams::Leave. Returns OK if there is none.
  absl::Status AwaitOthersLeave();
  // Makes stores fault from now on, before the daemon may read what was stored.
  void Close();

 private:
  Attachment& attachment_;
  uint64_t requests_ = 0;  // in this session
  bool requested_ = false;
  bool open_ = false;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_WINDOWS_H_
