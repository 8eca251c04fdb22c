#include "client/c/attachment/step_ledger.h"

#include <utility>

namespace shardd {

void StepLedger::Reset(const v1::AttachRankResponse& attach) {
  *this = StepLedger();
  expected_version_ = attach.version();
  committed_step_ = attach.committed_step();
  trainer_state_ = attach.trainer_state();
}

void StepLedger::Retire(const WordWaits& waits, const DaemonPage& page) {
  if (pending_.empty() && !pass_begins_) {
    return;
  }
  // Looked at before the version, which is published first.
  const bool begun = pass_begins_ && waits.Reached(page.passes, passes_);
  const uint64_t version = waits.SequenceOf(page.version);
  while (!pending_.empty() && pending_.front().version <= version) {
    committed_step_ = pending_.front().step;
    trainer_state_ = std::move(pending_.front().trainer_state);
    pending_.pop_front();
  }
  if (!begun) {
    return;
  }
  pass_begins_ = false;
  expected_version_ = version;
  awaited_version_ = version;  // all that was enqueued since the pass was entered runs behind it
  if (entering_stepped_ || !entering_state_.empty()) {
    trainer_state_ = std::move(entering_state_);
  }
  committed_step_ += entering_stepped_ ? 1 : 0;
}

void StepLedger::Abort(const v1::SessionEvent::Aborted& aborted) {
  committed_step_ = aborted.committed_step();
  trainer_state_ = aborted.trainer_state();
  pending_.clear();
  pass_begins_ = false;
}

int64_t StepLedger::StepSent(std::string trainer_state) {
  const int64_t number = last_sent_step() + 1;
  ++expected_version_;
  pending_.push_back({number, expected_version_, std::move(trainer_state)});
  return number;
}

void StepLedger::PassSent(bool stepped, std::string trainer_state) {
  ++passes_;
  entering_pass_ = true;
  entering_stepped_ = stepped;
  entering_state_ = std::move(trainer_state);
}

void StepLedger::PassEntered() {
  entering_pass_ = false;
  pass_begins_ = true;
}

}  // namespace shardd
