#ifndef SHARDD_CLIENT_C_ATTACHMENT_STEP_LEDGER_H_
#define SHARDD_CLIENT_C_ATTACHMENT_STEP_LEDGER_H_

#include <cstdint>
#include <deque>
#include <string>

#include "client/c/session/word_waits.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

// What one rank knows of its job's versions: which step is committed and with which trainer state, which steps and
// which pass it has sent whose commit it has not seen yet, and the version that its own next request reads. Owns these
// facts; reads the daemon's words as it is given them. Thread-compatible.
class StepLedger {
 public:
  // A new session begins at what its attach has brought.
  void Reset(const v1::AttachRankResponse& attach);
  // Takes over what has been committed. A look at two words while something is on its way, else nothing.
  void Retire(const WordWaits& waits, const DaemonPage& page);
  // The epoch has ended: what was on its way is void.
  void Abort(const v1::SessionEvent::Aborted& aborted);

  // Those of what was retired last.
  int64_t committed_step() const { return committed_step_; }
  const std::string& trainer_state() const { return trainer_state_; }
  // The version that what is sent next reads.
  uint64_t expected_version() const { return expected_version_; }
  // The number of the step that is being made: what follows belongs to it.
  int64_t running_step() const { return last_sent_step() + (pass_begins_ && entering_stepped_ ? 2 : 1); }

  // A step was sent: its number. Its version is expected from now on.
  int64_t StepSent(std::string trainer_state);
  // Every rank has committed what it wrote, outside of a step.
  void ParametersCommitted() { ++expected_version_; }

  // A pass is sent, then entered, then it has begun: with that, the daemon's words say what it has committed.
  void PassSent(bool stepped, std::string trainer_state);
  void PassEntered();
  // The record of a pass is sent; an interrupted wait goes on.
  bool entering_pass() const { return entering_pass_; }
  bool entering_stepped() const { return entering_stepped_; }
  // pass_copies: the program's stream waits for the pass that was entered, of which the host has seen no more than that
  // nothing holds it up.
  bool pass_begins() const { return pass_begins_; }
  uint64_t passes() const { return passes_; }

  // What is enqueued into the program's stream runs behind the commit of this version.
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
