#ifndef SHARDD_CLIENT_C_JOB_WRITE_WATCH_H_
#define SHARDD_CLIENT_C_JOB_WRITE_WATCH_H_

#include "absl/status/status.h"
#include "client/c/attachment/attachment.h"
#include "client/c/job/write_faults.h"

namespace shardd {

// Owns whether stores into the job's protected memory are watched (shardd_watch_writes), and which ranges WriteFaults
// knows. Thread-compatible. REQUIRES: WriteFaults forgets the handler before either is destroyed.
class WriteWatch {
 public:
  explicit WriteWatch(Attachment& attachment) : attachment_(attachment) {}
  WriteWatch(const WriteWatch&) = delete;
  WriteWatch& operator=(const WriteWatch&) = delete;

  // Sets the handler of faults, which is constructed after this. REQUIRES: called once, before any other call.
  void set_handler(StoreFaultHandler* handler) { handler_ = handler; }
  // If `watch`, the first store into protected shards opens the window by itself from now on.
  absl::Status Set(bool watch);
  // Watches the memory of a new session instead of the former one's.
  void OnNewSession();
  // Watches a slab that was mapped later.
  void OnSlabMapped();
  // Installs the SIGSEGV handler again before a pass: the program may have replaced it.
  absl::Status Renew() const { return watching_ ? WriteFaults::Renew() : absl::OkStatus(); }

 private:
  absl::Status WatchSlabs();

  Attachment& attachment_;
  StoreFaultHandler* handler_ = nullptr;
  bool watching_ = false;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_WRITE_WATCH_H_
