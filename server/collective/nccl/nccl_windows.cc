#include "server/collective/nccl/nccl_windows.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/device/device_memory.h"

namespace shardd {

NcclWindows::NcclWindows(std::shared_ptr<NcclCommunicator> communicator, Replace replace)
    : replace_(std::move(replace)), communicator_(std::move(communicator)), slots_(communicator_->members()) {}

NcclWindows::Slabs NcclWindows::WantedLocked() const {
  const bool whole = std::find(slots_.begin(), slots_.end(), nullptr) == slots_.end();
  return whole && !is_stopped_ && refused_.empty() && communicator_->broken().ok() ? slots_ : Slabs();
}

void NcclWindows::MaybeStartLocked() {
  if (is_working_ || inside_ > 0 || (waiting_.empty() && WantedLocked() == registered_)) return;
  is_working_ = true;
  std::thread([self = shared_from_this()] { self->Work(); }).detach();
}

void NcclWindows::SetSlots(int rank, std::shared_ptr<const DeviceSlab> slots) {
  absl::MutexLock lock(&mutex_);
  slots_[static_cast<size_t>(rank)].swap(slots);  // if this was the last reference, the old slots end without the lock
  MaybeStartLocked();
}

void NcclWindows::Use(std::shared_ptr<NcclCommunicator> communicator) {
  Slabs before;
  absl::MutexLock lock(&mutex_);
  communicator_.swap(communicator);
  before.swap(registered_);
  MaybeStartLocked();
}

void NcclWindows::Enter(std::function<void()> issue, std::function<void()> cancel) {
  {
    absl::MutexLock lock(&mutex_);
    if (is_working_ || !waiting_.empty() || WantedLocked() != registered_) {
      waiting_.push_back({std::move(issue), std::move(cancel)});
      MaybeStartLocked();
      return;
    }
    ++inside_;
  }
  issue();
}

void NcclWindows::Leave() {
  absl::MutexLock lock(&mutex_);
  --inside_;
  MaybeStartLocked();
}

void NcclWindows::Stop() {
  std::deque<Sum> cancelled;
  {
    absl::MutexLock lock(&mutex_);
    is_stopped_ = true;
    cancelled.swap(waiting_);
    mutex_.Await(absl::Condition(
        +[](bool* issuing) { return !*issuing; }, &is_issuing_));
    std::move(waiting_.begin(), waiting_.end(), std::back_inserter(cancelled));
    waiting_.clear();
    MaybeStartLocked();
  }
  for (const Sum& sum : cancelled) sum.cancel();
}

void NcclWindows::Work() {
  mutex_.Lock();
  while (true) {
    const bool is_due = WantedLocked() != registered_;
    if (is_due && inside_ == 0) {
      // Releasing the last reference waits for the GPU or for NCCL: do it without the lock.
      std::shared_ptr<NcclCommunicator> communicator = communicator_;
      Slabs from = registered_;
      Slabs to = from.empty() ? WantedLocked() : Slabs();
      mutex_.Unlock();
      Change(communicator, to);
      from.clear();
      to.clear();
      communicator.reset();
      mutex_.Lock();
    } else if (!is_due && !waiting_.empty()) {
      Sum sum = std::move(waiting_.front());
      waiting_.pop_front();
      ++inside_;
      is_issuing_ = true;
      mutex_.Unlock();
      sum.issue();
      sum = {};
      mutex_.Lock();
      is_issuing_ = false;
    } else {
      break;
    }
  }
  is_working_ = false;
  mutex_.Unlock();
}

NcclWindows::Outcome NcclWindows::Ask(NcclCommunicator& communicator, const Slabs& to, const Replace& replace) {
  const bool registers = !to.empty();
  Outcome outcome;
  outcome.status = registers ? communicator.RegisterWindow(to) : communicator.DeregisterWindow();
  const bool was_broken = !communicator.broken().ok();  // broken by something else: the next one may have a window
  outcome.refuses = !outcome.status.ok() && registers && !was_broken;
  if (!outcome.status.ok() && !absl::IsFailedPrecondition(outcome.status) && !was_broken) {
    communicator.Break(outcome.status);
    if (registers && replace != nullptr) outcome.instead = replace();
  }
  return outcome;
}

void NcclWindows::Change(const std::shared_ptr<NcclCommunicator>& communicator, const Slabs& to) {
  struct Asked {
    absl::Notification ended;
    Outcome outcome;
  };
  const auto asked = std::make_shared<Asked>();
  // NCCL limits its work, not its call: a call that does not return keeps this thread only.
  std::thread([asked, communicator = communicator, to = to, replace = replace_]() mutable {
    asked->outcome = Ask(*communicator, to, replace);
    to.clear();
    communicator.reset();
    asked->ended.Notify();
  }).detach();
  Outcome outcome;
  if (asked->ended.WaitForNotificationWithTimeout(kLimits * communicator->limit())) {
    outcome = std::move(asked->outcome);
  } else {
    outcome.status = absl::DeadlineExceededError(
        absl::StrCat(to.empty() ? "ncclCommWindowDeregister" : "ncclCommWindowRegister, or a communicator instead,",
                     " has not come back after ", absl::FormatDuration(kLimits * communicator->limit()), " (",
                     communicator->name(), "); until it does it keeps memory of gradient slots"));
    outcome.refuses = true;
    communicator->Break(outcome.status);
  }
  absl::MutexLock lock(&mutex_);
  if (outcome.refuses) refused_ = std::string(outcome.status.message());
  if (communicator_ != communicator) return;  // replaced meanwhile
  if (outcome.instead != nullptr) communicator_ = std::move(outcome.instead);
  const bool registered = !to.empty() && outcome.status.ok();
  registered_ = registered ? to : Slabs();
  if (registered) ++registrations_;
}

std::string NcclWindows::Describe() const {
  absl::MutexLock lock(&mutex_);
  const std::string times = absl::StrCat("registered ", registrations_, " time(s)");
  if (!registered_.empty()) {
    return absl::StrCat("symmetric window of ", registered_[0]->size_bytes(), " bytes on each GPU, ", times);
  }
  if (!refused_.empty()) return absl::StrCat("no symmetric window, ", times, ": ", refused_);
  const bool whole = std::find(slots_.begin(), slots_.end(), nullptr) == slots_.end();
  return absl::StrCat("no symmetric window now, ", times, ": ",
                      !whole                          ? "not every rank has gradient slots"
                      : !communicator_->broken().ok() ? "the communicator is broken"
                                                      : "it is being registered");
}

bool NcclWindows::registered() const {
  absl::MutexLock lock(&mutex_);
  return !registered_.empty();
}

}  // namespace shardd
