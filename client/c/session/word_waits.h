#ifndef SHARDD_CLIENT_C_SESSION_WORD_WAITS_H_
#define SHARDD_CLIENT_C_SESSION_WORD_WAITS_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/c/session/session_life.h"
#include "client/c/session/session_memory.h"

namespace shardd {

// Who waits for what, for error texts only. Pointers are borrowed for the call.
struct WaitFor {
  const char* call;                    // "wait_unshard"
  const std::string* group = nullptr;  // its name
  const char* what = "";               // "the parameters of the last step"
};
std::string WaitText(const WaitFor& reason);  // "wait_unshard group \"x\": the unshard"

// The host's waits for the daemon's words, each bounded by the session's timeout. Owns the count of them.
// Thread-compatible.
class WordWaits {
 public:
  // `life` and `memory` outlive this.
  WordWaits(SessionLife& life, const SessionMemory& memory, absl::Duration timeout)
      : life_(life), memory_(memory), epoch_(life.epoch()), timeout_(timeout) {}

  absl::Duration timeout() const { return timeout_; }
  uint64_t waits() const { return waits_; }  // that were not satisfied at once
  uint64_t wait_ns() const { return wait_ns_; }

  // One load: `word` has come to `sequence` in this epoch. Sequence 0 always has.
  bool Reached(const TimelineWord& word, uint64_t sequence) const {
    const uint64_t value = word.load(std::memory_order_acquire);
    return sequence == 0 || (value >= TimelineValue(epoch_, sequence) && TimelineEpoch(value) == epoch_);
  }
  // The word's sequence if it is of this epoch, else 0.
  uint64_t SequenceOf(const TimelineWord& word) const {
    const uint64_t value = word.load(std::memory_order_acquire);
    return TimelineEpoch(value) == epoch_ ? TimelineSequence(value) : 0;
  }
  // Until Reached, at most the timeout. DEADLINE_EXCEEDED or CANCELLED naming `reason`; else as SessionLife::Live.
  absl::Status Wait(const TimelineWord& word, uint64_t sequence, const WaitFor& reason) {
    return Reached(word, sequence) ? absl::OkStatus() : WaitSlow(word, sequence, reason);
  }
  // Looks at the word for some 20 us, giving the processor to others in between.
  bool Spin(const TimelineWord& word, uint64_t sequence) const;
  // As Wait, at most 50 ms; OK when they have passed.
  absl::Status WaitBriefly(const TimelineWord& word, uint64_t sequence, const char* call);
  // For waits of the host's for its GPU: OK while the session lives, nobody interrupts and the timeout, which begins
  // now, is not over.
  std::function<absl::Status()> GoOn(const WaitFor& reason);

 private:
  absl::Status WaitSlow(const TimelineWord& word, uint64_t sequence, const WaitFor& reason);
  absl::Status Deadline(const TimelineWord& word, uint64_t sequence, const WaitFor& reason) const;
  absl::Status Slice(const TimelineWord& word, uint64_t sequence, absl::Time deadline);

  SessionLife& life_;
  const SessionMemory& memory_;
  const uint64_t epoch_;
  const absl::Duration timeout_;
  uint64_t waits_ = 0;
  uint64_t wait_ns_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_SESSION_WORD_WAITS_H_
