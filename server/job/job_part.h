#ifndef SHARDD_SERVER_JOB_JOB_PART_H_
#define SHARDD_SERVER_JOB_JOB_PART_H_

// A job and its components, as they know each other: what happens to the job as a whole, and each component does
// something about (each fact stands with its owner that way, and no list of them in the job); and what a component may
// ask of the job.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/status/status_macros.h"

namespace shardd {

class Session;

// What a component may ask of its job, of which it knows nothing else. All is called on the loop.
class JobControl {
 public:
  // Something of the running epoch went wrong: the epoch ends with `cause`, behind a version that is being made.
  virtual void Fail(absl::Status cause) = 0;
  // There is nothing to go on with, or back to: the job ends.
  virtual void Close(const std::string& why) = 0;
  // Does what may happen next (advance.h).
  virtual void Advance() = 0;
  // A reference that keeps the job, and so its slabs, alive. REQUIRES: the job's destructor has not begun.
  virtual std::shared_ptr<void> Keep() = 0;

 protected:
  ~JobControl() = default;
};

// All is called on the loop. Nothing of the job may be called from here but what the component owns or uses as a
// service.
class JobPart {
 public:
  // One more step is committed: what belongs to it is over, and the next one begins.
  virtual void StepCommitted() {}
  // Values that trainers have written are committed.
  virtual void ValuesCommitted() {}
  // One more version is committed, whatever made it; all have heard of the step, or of the values, before.
  virtual void VersionCommitted() {}
  // ABORTED: no session may begin yet, and who attaches has to come again. `what` begins the error.
  virtual absl::Status CheckMayBegin(const std::string& what) {
    (void)what;
    return absl::OkStatus();
  }
  // The session is about to end.
  virtual void SessionEnds(Session* session) { (void)session; }
  // The rank has left, and takes no part in the running step any more: its next session begins with nothing of it.
  virtual void Forget(int rank) { (void)rank; }
  // The epoch has ended, and its sessions with it: drops what was begun since the last commit.
  virtual void EndEpoch() {}

 protected:
  ~JobPart() = default;
};

// The parts of a job, which hear of everything in one order.
class JobParts final : public JobPart {
 public:
  // All outlive this.
  explicit JobParts(std::vector<JobPart*> parts) : parts_(std::move(parts)) {}

  void StepCommitted() override {
    for (JobPart* const part : parts_) part->StepCommitted();
  }
  void ValuesCommitted() override {
    for (JobPart* const part : parts_) part->ValuesCommitted();
  }
  void VersionCommitted() override {
    for (JobPart* const part : parts_) part->VersionCommitted();
  }
  absl::Status CheckMayBegin(const std::string& what) override {
    for (JobPart* const part : parts_) SHARDD_RETURN_IF_ERROR(part->CheckMayBegin(what));
    return absl::OkStatus();
  }
  void SessionEnds(Session* session) override {
    for (JobPart* const part : parts_) part->SessionEnds(session);
  }
  void Forget(int rank) override {
    for (JobPart* const part : parts_) part->Forget(rank);
  }
  void EndEpoch() override {
    for (JobPart* const part : parts_) part->EndEpoch();
  }

 private:
  const std::vector<JobPart*> parts_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_JOB_PART_H_
