#ifndef SHARDD_CLIENT_C_SESSION_WORD_WAITS_H_
#define SHARDD_CLIENT_C_SESSION_WORD_WAITS_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/c/session/session_life.h"
#include "client/c/session/session_memory.h"
#include "common/shm/page.h"

namespace shardd {

// Who waits for what, for error texts only. Pointers are borrowed for the call.
struct WaitFor {
  const char* call;                    // "wait_unshard"
  const std::string* group = nullptr;  // its name
  const char* what = "";               // "the parameters of the last step"
  const char* remedy = "";             // behind the error of a wait that was too long: "; wait longer"
};
std::string WaitText(const WaitFor& reason);  // "wait_unshard group \"x\": the unshard"

// Makes the host wait for the daemon's words, at most for the session's timeout. Owns the counts of such waits.
// Thread-compatible.
class WordWaits {
 public:
  // `life` and `memory` outlive this.
  WordWaits(SessionLife& life, const SessionMemory& memory, absl::Duration timeout)
      : life_(life), memory_(memory), epoch_(life.epoch()), timeout_(timeout) {}

  absl::Duration timeout() const { return timeout_; }
  uint64_t waits() const { return waits_; }  // that were not satisfied at once
  uint64_t wait_ns() const { return wait_ns_; }

  // True if `word` has reached `sequence` in this epoch; always for sequence 0. Costs one load.
  bool Reached(const TimelineWord& word, uint64_t sequence) const {
    const uint64_t value = word.load(std::memory_order_acquire);
    return sequence == 0 || (value >= TimelineValue(epoch_, sequence) && TimelineEpoch(value) == epoch_);
  }
  // Returns the word's sequence if it is of this epoch, else 0.
  uint64_t SequenceOf(const TimelineWord& word) const {
    const uint64_t value = word.load(std::memory_order_acquire);
    return TimelineEpoch(value) == epoch_ ? TimelineSequence(value) : 0;
  }
  // How many of this rank's closed backwards no rank can delay any more. Whoever is woken by `reduced` may see
  // `reducing` as it was before.
  uint64_t Reducing(const DaemonPage& page) const {
    return std::max(SequenceOf(page.reducing), SequenceOf(page.reduced));
  }
  // Waits until Reached. Returns DEADLINE_EXCEEDED after the timeout or CANCELLED, both naming `reason`, or what
  // SessionLife::Live returns.
  absl::Status Wait(const TimelineWord& word, uint64_t sequence, const WaitFor& reason) {
    return Reached(word, sequence) ? absl::OkStatus() : WaitSlow(word, sequence, reason);
  }
  // Polls the word for some 20 us and yields the processor in between. Returns whether it was reached.
  bool Spin(const TimelineWord& word, uint64_t sequence) const;
  // Waits like Wait, but returns OK after 50 ms.
  absl::Status WaitBriefly(const TimelineWord& word, uint64_t sequence, const char* call);
  // Returns a check for loops in which the host waits for its GPU: OK while the session lives, nobody interrupts, and
  // the timeout, which begins now, has not passed.
  std::function<absl::Status()> GoOn(const WaitFor& reason);

 private:
  absl::Status WaitSlow(const TimelineWord& word, uint64_t sequence, const WaitFor& reason);
  absl::Status DidNotCome(const TimelineWord& word, uint64_t sequence, const WaitFor& reason) const;
  absl::Status Slice(const TimelineWord& word, uint64_t sequence, absl::Duration limit);

  SessionLife& life_;
  const SessionMemory& memory_;
  const uint64_t epoch_;
  const absl::Duration timeout_;
  uint64_t waits_ = 0;
  uint64_t wait_ns_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_SESSION_WORD_WAITS_H_
