#ifndef SHARDD_CLIENT_C_HOST_INTERRUPT_H_
#define SHARDD_CLIENT_C_HOST_INTERRUPT_H_

#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace shardd {

// Whether the host of this library wants a wait to end: shardd_set_interrupt. Every wait asks at least every kSlice, on
// the thread that waits and with no lock held, and ends with CANCELLED once the answer was yes: the host has taken that
// as said (Python: the exception of its signal handler is pending).
// Thread-compatible, but for SetForProcess and what was set with it.
class Interrupt {
 public:
  using Question = std::function<bool()>;
  static constexpr absl::Duration kSlice = absl::Milliseconds(50);

  // For those that have no question of their own. nullptr: none. Thread-safe.
  static void SetForProcess(Question question);
  // Of no one: for waits during which nothing of the host's may run.
  static const Interrupt& Never();

  void Set(Question question) { question_ = std::move(question); }
  // Asks.
  bool Raised() const;
  // Asks; CANCELLED: "<call>: interrupted".
  absl::Status Check(absl::string_view call) const;
  // As Check, after sleeping; ends early with a signal handler that makes the answer yes.
  absl::Status Sleep(absl::Duration duration, absl::string_view call) const;

  static absl::Status Cancelled(absl::string_view call);
  // Whether an interrupt has ended what has this status: a daemon's CANCELLED says something else.
  static bool Ended(const absl::Status& status);

 private:
  Question question_;
  bool never_ = false;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_HOST_INTERRUPT_H_
