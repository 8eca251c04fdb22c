#ifndef SHARDD_CLIENT_C_JOB_VALUES_H_
#define SHARDD_CLIENT_C_JOB_VALUES_H_

#include <cstdint>

#include "absl/status/status.h"
#include "client/c/attachment/attachment.h"
#include "client/c/attachment/staging.h"
#include "client/c/job/full_params.h"
#include "client/c/job/optimizer_state.h"

namespace shardd {

// Writes values of parameters, gradients and optimizer state through the daemon, and owns the commit that makes a
// version of them: before the first version, and inside of full parameters with writeback. Thread-compatible. REQUIRES
// of all: param within the plan.
class Values {
 public:
  Values(Attachment& attachment, Staging& staging, FullParams& full_params, OptimizerState& optimizer)
      : attachment_(attachment), staging_(staging), full_params_(full_params), optimizer_(optimizer) {}
  // As in a new session.
  void Reset() { commit_sent_ = false; }

  // The calls of the C ABI.
  absl::Status WriteParameter(int param, const void* data, int64_t first, int64_t numel);
  absl::Status WriteGradient(int param, const void* data, int64_t first, int64_t numel);
  absl::Status WriteOptimizerState(int param, int state, const float* data, int64_t first, int64_t numel);
  absl::Status WriteUpdateCount(int param, int64_t count);
  absl::Status Commit();

 private:
  // No version is there yet: all ranks write what they like.
  bool initial() const { return attachment_.ledger().expected_version() == 0; }
  absl::Status CheckRange(const char* call, int param, const void* data, int64_t first, int64_t numel) const;
  absl::Status CheckWritable(const char* call, int param) const;
  // Elements of `element_bytes` each; `flags` of the record.
  absl::Status WriteElements(int param, const void* data, int64_t first, int64_t numel, int64_t element_bytes,
                             uint32_t flags);

  Attachment& attachment_;
  Staging& staging_;
  FullParams& full_params_;
  OptimizerState& optimizer_;
  bool commit_sent_ = false;  // an interrupted wait for the version goes on
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_VALUES_H_
