#ifndef SHARDD_CLIENT_C_JOB_UNSHARDING_H_
#define SHARDD_CLIENT_C_JOB_UNSHARDING_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "client/c/attachment/attachment.h"
#include "client/c/attachment/handle_set.h"
#include "client/c/job/passes.h"

namespace shardd {

// Owns the rank's unshards of this session: how many of each group it has asked for, and where in the pool the group
// lies. Thread-compatible. REQUIRES of all: group and param within the plan.
class Unsharding {
 public:
  Unsharding(Attachment& attachment, HandleSet& handles, Passes& passes)
      : attachment_(attachment), handles_(handles), passes_(passes) {}
  // As in a new session.
  void Reset();

  // The calls of the C ABI. `event`: the unshard of a forward or a backward.
  absl::Status Unshard(int group, HandleEvent event);
  absl::Status Wait(int group);
  absl::Status Reshard(int group);
  // Null: the group is not unsharded.
  const void* ParameterData(int param) const;

  // FAILED_PRECONDITION: nobody has asked for the group.
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
