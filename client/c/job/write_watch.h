#ifndef SHARDD_CLIENT_C_JOB_WRITE_WATCH_H_
#define SHARDD_CLIENT_C_JOB_WRITE_WATCH_H_

#include "absl/status/status.h"
#include "client/c/attachment/attachment.h"
#include "client/c/job/write_faults.h"

namespace shardd {

// Owns whether stores into the job's protected memory are watched (shardd_watch_writes), and the ranges of it that
// WriteFaults knows. Thread-compatible. REQUIRES: WriteFaults forgets the handler before any of both is destroyed.
class WriteWatch {
 public:
  WriteWatch(Attachment& attachment, StoreFaultHandler& handler) : attachment_(attachment), handler_(handler) {}
  WriteWatch(const WriteWatch&) = delete;
  WriteWatch& operator=(const WriteWatch&) = delete;

  // A store into protected shards opens the window by itself from now on, or faults again.
  absl::Status Set(bool watch);
  // The session's memory is another one.
  void OnNewSession();
  // Another slab was mapped.
  void OnSlabMapped();
  // Before a pass is entered: the handler may have been replaced since.
  absl::Status Renew() const { return watching_ ? WriteFaults::Renew() : absl::OkStatus(); }

 private:
  absl::Status WatchSlabs();

  Attachment& attachment_;
  StoreFaultHandler& handler_;
  bool watching_ = false;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_WRITE_WATCH_H_
