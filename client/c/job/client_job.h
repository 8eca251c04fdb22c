#ifndef SHARDD_CLIENT_C_JOB_CLIENT_JOB_H_
#define SHARDD_CLIENT_C_JOB_CLIENT_JOB_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/c/attachment/attachment.h"
#include "client/c/attachment/handle_set.h"
#include "client/c/attachment/staging.h"
#include "client/c/job/edit_writeback.h"
#include "client/c/job/edits.h"
#include "client/c/job/full_params.h"
#include "client/c/job/gradients.h"
#include "client/c/job/graphs.h"
#include "client/c/job/hand_ins.h"
#include "client/c/job/optimizer_state.h"
#include "client/c/job/passes.h"
#include "client/c/job/read_only_memory.h"
#include "client/c/job/steps.h"
#include "client/c/job/unsharding.h"
#include "client/c/job/values.h"

namespace shardd {

// One attached rank: what shardd_job is behind the C ABI, whose header has the contracts. It composes the parts of a
// job, each of which owns its state and serves its calls, and has itself the calls that concern all of them: attach,
// reattach, extend and detach. Thread-compatible.
class ClientJob {
 public:
  static absl::StatusOr<std::unique_ptr<ClientJob>> Attach(AttachOptions options);
  ClientJob(const ClientJob&) = delete;
  ClientJob& operator=(const ClientJob&) = delete;

  absl::Status Reattach();
  // Returns true if a wider job has replaced this one, which is over then.
  absl::StatusOr<bool> Extend(v1::JobSpec spec);
  // As shardd_job_info.lost_nothing. What the program has stored since its last step, and not handed in, would be lost.
  bool LostNothing();
  // Takes at most 5 s, or the timeout if `finished`: that waits for the commit of the last step. REQUIRES: no call
  // follows.
  absl::Status Detach(bool finished);

  const RankPlan& rank_plan() const { return attachment_.plan(); }
  const ShardPlan& plan() const { return attachment_.plan().plan(); }
  Attachment& attachment() { return attachment_; }
  Gradients& gradients() { return gradients_; }
  ReadOnlyMemory& read_only_memory() { return read_only_memory_; }
  OptimizerState& optimizer_state() { return optimizer_state_; }
  Passes& passes() { return passes_; }
  Unsharding& unsharding() { return unsharding_; }
  FullParams& full_params() { return full_params_; }
  Values& values() { return values_; }
  Steps& steps() { return steps_; }
  Graphs& graphs() { return graphs_; }

 private:
  explicit ClientJob(AttachOptions options);
  // *has_all: whether the job has what this process has stored into parameters, also where its epoch ends now.
  absl::Status DetachOnce(bool finished, bool* has_all);
  // Makes every part begin the attachment's new session.
  void BeginSession();

  Attachment attachment_;
  HandleSet handles_;
  Staging staging_;
  HandIns hand_ins_;
  Edits edits_;
  Gradients gradients_;
  ReadOnlyMemory read_only_memory_;
  OptimizerState optimizer_state_;
  FullParams full_params_;
  Values values_;
  EditWriteback writeback_;
  Passes passes_;
  Unsharding unsharding_;
  Steps steps_;
  Graphs graphs_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_CLIENT_JOB_H_
