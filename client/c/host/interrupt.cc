#include "client/c/host/interrupt.h"

#include <errno.h>
#include <time.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/clock/deadline.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr absl::string_view kInterrupted = ": interrupted";

// Never destroyed: a wait may outlast static destructors.
struct OfProcess {
  absl::Mutex mutex;
  // Shared, so that it can be replaced while another thread asks.
  std::shared_ptr<const Interrupt::Question> question ABSL_GUARDED_BY(mutex);
};
OfProcess& Process() {
  static auto* const process = new OfProcess;
  return *process;
}

}  // namespace

void Interrupt::SetForProcess(Question question) {
  auto shared = question == nullptr ? nullptr : std::make_shared<const Question>(std::move(question));
  absl::MutexLock lock(&Process().mutex);
  Process().question = std::move(shared);
}

const Interrupt& Interrupt::Never() {
  static const Interrupt* const never = [] {
    auto* made = new Interrupt;
    made->never_ = true;
    return made;
  }();
  return *never;
}

bool Interrupt::Raised() const {
  if (never_) {
    return false;
  }
  if (question_ != nullptr) {
    return question_();
  }
  std::shared_ptr<const Question> question;
  {
    absl::MutexLock lock(&Process().mutex);
    question = Process().question;
  }
  return question != nullptr && (*question)();
}

absl::Status Interrupt::Check(absl::string_view call) const { return Raised() ? Cancelled(call) : absl::OkStatus(); }

absl::Status Interrupt::Sleep(absl::Duration duration, absl::string_view call) const {
  const Deadline end = Deadline::In(duration);
  for (absl::Duration left = duration; left > absl::ZeroDuration(); left = end.Left()) {
    // Not absl::SleepFor, which goes on sleeping when a signal handler has run.
    const timespec slice = absl::ToTimespec(std::min(left, kSlice));
    (void)nanosleep(&slice, nullptr);
    SHARDD_RETURN_IF_ERROR(Check(call));
  }
  return absl::OkStatus();
}

absl::Status Interrupt::Cancelled(absl::string_view call) {
  return absl::CancelledError(absl::StrCat(call, kInterrupted));
}

bool Interrupt::Ended(const absl::Status& status) {
  return absl::IsCancelled(status) && absl::StrContains(status.message(), kInterrupted);
}

}  // namespace shardd
