#include "client/c/session/word_waits.h"

#include <sched.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/clock/deadline.h"
#include "common/clock/monotonic_now.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

// How long a waiter sleeps before it looks whether the stream still lives. An epoch that advances wakes it at once.
constexpr absl::Duration kWaitSlice = Interrupt::kSlice;
constexpr absl::Duration kSpin = absl::Microseconds(20);

}  // namespace

std::string WaitText(const WaitFor& reason) {
  return absl::StrCat(reason.call, reason.group == nullptr ? "" : absl::StrCat(" group \"", *reason.group, "\""), ": ",
                      reason.what);
}

absl::Status WordWaits::DidNotCome(const TimelineWord& word, uint64_t sequence, const WaitFor& reason) const {
  const std::string whom = life_.stream().waiting_for();
  return absl::DeadlineExceededError(
      absl::StrCat(WaitText(reason), " did not come within ", absl::FormatDuration(timeout_), " (got ",
                   SequenceOf(word), ", want ", sequence, "; rank=", life_.rank(), ")",
                   whom.empty() ? "" : absl::StrCat("; it waits for ", whom), reason.remedy));
}

absl::Status WordWaits::Slice(const TimelineWord& word, uint64_t sequence, absl::Duration limit) {
  const WaitResult result =
      TimelineWait(word, TimelineValue(epoch_, sequence), memory_.view().page().waiting, std::min(limit, kWaitSlice));
  if (result == WaitResult::kReached) {
    // A later epoch satisfies every wait of this one.
    return Reached(word, sequence) ? absl::OkStatus() : life_.Failure();
  }
  return life_.Live();
}

bool WordWaits::Spin(const TimelineWord& word, uint64_t sequence) const {
  const Deadline end = Deadline::In(kSpin);
  while (!Reached(word, sequence)) {
    if (end.HasPassed()) {
      return false;
    }
    sched_yield();
  }
  return true;
}

absl::Status WordWaits::WaitBriefly(const TimelineWord& word, uint64_t sequence, const char* call) {
  const absl::Status status = Slice(word, sequence, absl::InfiniteDuration());
  return status.ok() && !Reached(word, sequence) ? life_.interrupt().Check(call) : status;
}

absl::Status WordWaits::WaitSlow(const TimelineWord& word, uint64_t sequence, const WaitFor& reason) {
  const absl::Time start = MonotonicNow();
  const Deadline deadline = Deadline::In(timeout_);
  absl::Status status;
  do {
    status = Slice(word, sequence, deadline.Left());
    if (status.ok() && !Reached(word, sequence) && life_.interrupt().Raised()) {
      status = absl::CancelledError(absl::StrCat(reason.call, ": interrupted (rank=", life_.rank(), ")"));
    }
    if (status.ok() && !Reached(word, sequence) && deadline.HasPassed()) {
      status = DidNotCome(word, sequence, reason);
    }
  } while (status.ok() && !Reached(word, sequence));
  ++waits_;
  wait_ns_ += static_cast<uint64_t>(absl::ToInt64Nanoseconds(MonotonicNow() - start));
  return status;
}

std::function<absl::Status()> WordWaits::GoOn(const WaitFor& reason) {
  const Deadline deadline = Deadline::In(timeout_);
  return [this, reason, deadline]() -> absl::Status {
    SHARDD_RETURN_IF_ERROR(life_.Live());
    SHARDD_RETURN_IF_ERROR(life_.interrupt().Check(reason.call));
    if (!deadline.HasPassed()) {
      return absl::OkStatus();
    }
    return absl::DeadlineExceededError(
        absl::StrCat(WaitText(reason), " within ", absl::FormatDuration(timeout_), " (rank=", life_.rank(), ")"));
  };
}

}  // namespace shardd
