#ifndef SHARDD_CLIENT_C_JOB_UNSHARDING_H_
#define SHARDD_CLIENT_C_JOB_UNSHARDING_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "client/c/attachment/attachment.h"
#include "client/c/attachment/handle_set.h"
#include "client/c/job/passes.h"

namespace shardd {

// Owns the rank's unshards of this session: how many it has requested of each group, and where each group lies in the
// pool. Thread-compatible. REQUIRES: group and param are within the plan.
class Unsharding {
 public:
  Unsharding(Attachment& attachment, HandleSet& handles, Passes& passes)
      : attachment_(attachment), handles_(handles), passes_(passes) {}
  // Begins a new session.
  void Reset();

  // These are calls of the C ABI. `event`: the unshard of a forward or a backward.
  absl::Status Unshard(int group, HandleEvent event);
  absl::Status Wait(int group);
  absl::Status Reshard(int group);
  // Returns null if the group is not unsharded.
  const void* ParameterData(int param) const;

  // Returns FAILED_PRECONDITION if the group is neither unsharded nor being unsharded.
  absl::Status CheckAsked(int group);

 private:
  absl::Status SendUnshard(int group, HandleEvent event);
  absl::Status WaitOne(int group);
  absl::Status WaitPooled(int group);

  Attachment& attachment_;
  HandleSet& handles_;
  Passes& passes_;
  std::vector<uint64_t> unshards_;          // by group: records sent
  std::vector<int64_t> pool_offset_bytes_;  // by group: POOLED
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_UNSHARDING_H_
