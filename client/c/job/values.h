#ifndef SHARDD_CLIENT_C_JOB_VALUES_H_
#define SHARDD_CLIENT_C_JOB_VALUES_H_

#include <cstdint>

#include "absl/status/status.h"
#include "client/c/attachment/attachment.h"
#include "client/c/attachment/staging.h"
#include "client/c/job/full_params.h"

namespace shardd {

// Writes values of parameters, gradients and optimizer state through the daemon, before the first version or inside of
// full parameters with writeback. Owns the commit that makes a version of them. Thread-compatible. REQUIRES: param is
// within the plan.
class Values {
 public:
  Values(Attachment& attachment, Staging& staging, FullParams& full_params)
      : attachment_(attachment), staging_(staging), full_params_(full_params) {}
  // Begins a new session.
  void Reset() { commit_sent_ = false; }
  // CommitParameters was sent, and nobody has waited for the version.
  bool commit_sent() const { return commit_sent_; }

  // These are calls of the C ABI.
  absl::Status WriteParameter(int param, const void* data, int64_t first, int64_t numel);
  absl::Status WriteGradient(int param, const void* data, int64_t first, int64_t numel);
  absl::Status WriteOptimizerState(int param, int state, const float* data, int64_t first, int64_t numel);
  absl::Status WriteUpdateCount(int param, int64_t count);
  absl::Status Commit();
  // The same as Commit and WriteParameter, within another call.
  absl::Status CommitWithin();
  absl::Status WriteWithin(int param, const void* data, int64_t first, int64_t numel);

 private:
  // True before the first version, when every rank may write any parameter.
  bool initial() const { return attachment_.ledger().expected_version() == 0; }
  // `of`: elements that there are.
  absl::Status CheckRange(const char* call, int param, const void* data, int64_t first, int64_t numel,
                          int64_t of) const;
  absl::Status CheckWritable(const char* call, int param) const;
  // Sends `numel` elements of `element_bytes` each, in records with these flags.
  absl::Status WriteElements(int param, const void* data, int64_t first, int64_t numel, int64_t element_bytes,
                             uint32_t flags);

  Attachment& attachment_;
  Staging& staging_;
  FullParams& full_params_;
  bool commit_sent_ = false;  // a wait that was interrupted can go on
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_VALUES_H_
