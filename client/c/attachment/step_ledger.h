#ifndef SHARDD_CLIENT_C_ATTACHMENT_STEP_LEDGER_H_
#define SHARDD_CLIENT_C_ATTACHMENT_STEP_LEDGER_H_

#include <cstdint>
#include <deque>
#include <string>

#include "client/c/session/word_waits.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

// Owns what one rank knows of its job's versions: the committed step with its trainer state, the steps and the pass
// that it has sent and not yet seen committed, and the version that its next request reads. Thread-compatible.
class StepLedger {
 public:
  // Begins a new session with the facts of its attach.
  void Reset(const v1::AttachRankResponse& attach);
  // Reads what has been committed since. Costs two loads while a step or pass is on its way, else nothing.
  void Retire(const WordWaits& waits, const DaemonPage& page);
  // Drops what was on its way: the epoch has ended.
  void Abort(const v1::SessionEvent::Aborted& aborted);

  // Both are as of the last Retire.
  int64_t committed_step() const { return committed_step_; }
  const std::string& trainer_state() const { return trainer_state_; }
  // Returns the version that the next request reads.
  uint64_t expected_version() const { return expected_version_; }
  // Returns the number of the running step, to which the next request belongs.
  int64_t running_step() const { return last_sent_step() + (pass_begins_ && entering_stepped_ ? 2 : 1); }

  // Returns the step that was sent last, committed or not, also with a pass that has not begun.
  int64_t sent_step() const { return last_sent_step() + (entering_pass_ && entering_stepped_ ? 1 : 0); }

  // Records that a step was sent, and returns its number. Its version is the expected one from now on.
  int64_t StepSent(std::string trainer_state);
  // Records a commit of all ranks outside of a step.
  void ParametersCommitted() { ++expected_version_; }

  // A pass is sent, then entered, and then begins: from then on the daemon's words tell what it has committed.
  void PassSent(bool stepped, std::string trainer_state);
  void PassEntered();
  // True from PassSent to PassEntered: a wait that was interrupted can go on.
  bool entering_pass() const { return entering_pass_; }
  bool entering_stepped() const { return entering_stepped_; }
  // True until the host has seen the pass begin. With pass_copies the program's stream may wait for that in its place.
  bool pass_begins() const { return pass_begins_; }
  uint64_t passes() const { return passes_; }

  // Records that what is enqueued into the program's stream runs after the commit of `version`.
  void StreamAwaits(uint64_t version) { awaited_version_ = version; }
  bool stream_awaits_expected() const { return awaited_version_ == expected_version_; }

 private:
  struct PendingStep {
    int64_t step;
    uint64_t version;
    std::string trainer_state;
  };
  int64_t last_sent_step() const { return pending_.empty() ? committed_step_ : pending_.back().step; }

  uint64_t expected_version_ = 0;
  int64_t committed_step_ = 0;
  std::string trainer_state_;
  std::deque<PendingStep> pending_;
  uint64_t awaited_version_ = 0;
  uint64_t passes_ = 0;
  bool entering_pass_ = false;
  bool entering_stepped_ = false;
  std::string entering_state_;
  bool pass_begins_ = false;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_ATTACHMENT_STEP_LEDGER_H_
