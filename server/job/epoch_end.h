#ifndef SHARDD_SERVER_JOB_EPOCH_END_H_
#define SHARDD_SERVER_JOB_EPOCH_END_H_

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/job/job_part.h"

namespace shardd {

class Commits;
class JobNodes;

// Whether the epoch that runs is to end, and may, and whether the job has ended.
//
//   epoch:  runs --Await (a version is being made that completes forward)--> is to end --Take (MayBegin)--> ends
//              \--AwaitStep--> runs, and is to end behind the next step that is committed
//              \--AwaitPass--> runs, and is to end where all ranks enter a pass, and have nothing else under way
//   job:    open --Close--> closed
//
// Owns the end that waits: the first cause, and all ranks that were lost. Loop-confined.
class EpochEnd final : public JobPart {
 public:
  struct Pending {
    absl::Status cause;
    std::vector<int> lost_ranks = {};
    bool behind_commit = false;  // of a step, and nobody has begun anything since
  };
  // Both outlive this.
  EpochEnd(const Commits* commits, const JobNodes* nodes) : commits_(commits), nodes_(nodes) {}

  bool closed() const { return closed_; }
  void Close() { closed_ = true; }

  // A decided step always completes forward, with the copy that is kept of it; those who died in between are found out
  // afterwards. On several nodes it may be decided already, and node 0 says whether (NodeStepsListener). Only a step
  // that is applied and may not be shown yet is no reason to wait: it ends with the epoch, unshown.
  bool MayBegin() const;
  bool pending() const { return pending_.has_value(); }
  // The epoch is to end as soon as it may.
  void Await(Pending end);
  // ... as soon as a step is committed for which `at_step` returns true. It is called before ranks hear of the version.
  void AwaitStep(absl::Status cause, std::function<bool()> at_step) {
    behind_step_ = {std::move(cause), std::move(at_step)};
  }
  void AwaitPass(absl::Status cause) { before_pass_ = std::move(cause); }
  bool awaits_step() const { return behind_step_.has_value(); }
  bool awaits_pass() const { return before_pass_.has_value(); }
  // REQUIRES: awaits_pass().
  Pending TakeBeforePass() { return {*std::exchange(before_pass_, std::nullopt), {}, /*behind_commit=*/true}; }
  // An epoch ends now, and a step of it may yet be committed.
  void Begins() { EndEpoch(); }
  void StepCommitted() override;
  void EndEpoch() override {
    behind_step_.reset();
    before_pass_.reset();
  }
  // The cause of the end that waits. REQUIRES, as Take: pending().
  const absl::Status& cause() const { return pending_->cause; }
  Pending Take();
  // All nodes end their attempt with `cause`, whatever this one has promised: returns the end that waited, which has
  // the cause of this node, or else `cause`. Behind a commit under way the end goes on waiting.
  Pending TakeOr(absl::Status cause);

 private:
  const Commits* const commits_;
  const JobNodes* const nodes_;
  std::optional<Pending> pending_;
  std::optional<std::pair<absl::Status, std::function<bool()>>> behind_step_;
  std::optional<absl::Status> before_pass_;
  bool closed_ = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_EPOCH_END_H_
