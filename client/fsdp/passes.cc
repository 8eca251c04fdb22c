#include "client/fsdp/passes.h"

#include <utility>

namespace shardd::fsdp {

void Passes::Use(bool copies) {
  used_ = true;
  copies_ = copies;
}

Status Passes::Enter() {
  if (!used_) {
    return Status();
  }
  if (inside_) {
    if (shell_.InsidePass()) {
      Status status = shell_.ResumeReading();
      if (status.ok()) {
        stopped_reading_ = false;
        return status;
      }
      if (shell_.InsidePass()) {
        return status;
      }
    }
    Status status = shell_.ReshardAll();  // of a pass that an edit has ended
    if (!status.ok()) {
      return status;
    }
  }
  Status status = shell_.EnterPass(stepped_, state_);
  if (!status.ok()) {
    return status;
  }
  inside_ = true;
  stopped_reading_ = false;
  state_.clear();
  if (std::exchange(stepped_, false)) {
    shell_.StepCommitted();
  }
  return status;
}

Status Passes::EnterForward() {
  by_hand_ = false;
  return Enter();
}

Status Passes::EnterByHand(bool backward) {
  if (!used_ || (inside_ && backward)) {
    return Status();
  }
  const bool entered = inside_ && shell_.InsidePass();  // else by nobody, or edits have ended it
  Status status = Enter();
  if (status.ok()) {
    by_hand_ = by_hand_ || !entered;
  }
  return status;
}

Status Passes::StopReading() {
  if (!inside_ || !shell_.InsidePass()) {
    return Status();
  }
  Status status = shell_.StopReading();
  stopped_reading_ = stopped_reading_ || status.ok();
  return status;
}

Status Passes::StopReadingByHand() {
  Status status = StopReading();
  by_hand_ = by_hand_ || status.ok();
  return status;
}

Status Passes::ResumeReading() {
  if (!stopped_reading_) {
    return Status();
  }
  Status status = shell_.ResumeReading();
  stopped_reading_ = !status.ok();
  return status;
}

Status Passes::Leave() {
  if (!inside_) {
    return Status();
  }
  Status status = shell_.ReshardAll();
  if (!status.ok()) {
    return status;
  }
  Stepped();
  return shell_.InsidePass() ? shell_.LeavePass() : Status();
}

Status Passes::End(bool reads_shards) {
  Status status = Leave();
  return status.ok() && copies_ && reads_shards ? Commit() : status;
}

Status Passes::Commit() {
  Status status = Leave();
  if (status.ok()) {
    status = Enter();
  }
  return status.ok() ? Leave() : status;
}

Status Passes::BeginWriting() {
  Status status = copies_ ? LeaveByHand() : Status();
  if (copies_ && status.ok()) {
    written_ = stopped_reading_;
  }
  return status;
}

void Passes::MarkStepped(std::string state) {
  stepped_ = true;
  state_ = std::move(state);
}

void Passes::Forget() {
  Stepped();
  stepped_ = false;
  state_.clear();
}

}  // namespace shardd::fsdp
