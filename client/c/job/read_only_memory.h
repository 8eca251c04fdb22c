#ifndef SHARDD_CLIENT_C_JOB_READ_ONLY_MEMORY_H_
#define SHARDD_CLIENT_C_JOB_READ_ONLY_MEMORY_H_

#include <memory>

#include "absl/status/status.h"
#include "client/c/attachment/attachment.h"
#include "client/c/job/read_only_faults.h"

namespace shardd {

// Owns whether stores into what the job's program may only read are named (shardd_watch_writes), and the texts for it.
// Thread-compatible.
class ReadOnlyMemory {
 public:
  explicit ReadOnlyMemory(Attachment& attachment) : attachment_(attachment) {}
  ~ReadOnlyMemory() { Forget(); }
  ReadOnlyMemory(const ReadOnlyMemory&) = delete;
  ReadOnlyMemory& operator=(const ReadOnlyMemory&) = delete;

  // If `watch`, a store into what is read-only is named from now on, before it ends the process.
  absl::Status Set(bool watch);
  // Names what a new session has mapped, or a session since, instead of what was mapped before.
  void OnMapped();

 private:
  absl::Status Watch();
  void Forget();

  Attachment& attachment_;
  bool watching_ = false;
  std::unique_ptr<const ReadOnlyTexts> texts_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_READ_ONLY_MEMORY_H_
