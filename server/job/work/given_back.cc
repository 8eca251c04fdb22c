#include "server/job/work/given_back.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "server/job/membership/sessions.h"
#include "server/loop/core_loop.h"
#include "server/session/session.h"

namespace shardd {

void PollTimer::On() {
  if (!fd_.valid()) {
    fd_ = UniqueFd(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  }
  if (!watched_ && fd_.valid()) {
    // Nothing but a reason for the loop to go round.
    loop_->AddFd(fd_.get(), [this] {
      uint64_t expired = 0;
      [[maybe_unused]] const ssize_t n = read(fd_.get(), &expired, sizeof(expired));
    });
    watched_ = true;
  }
  Set(true);
}

void PollTimer::Off() { Set(false); }

void PollTimer::Stop() {
  Set(false);
  if (std::exchange(watched_, false)) {
    loop_->RemoveFd(fd_.get());
  }
}

void PollTimer::Set(bool on) {
  if (on == on_ || !fd_.valid()) {
    return;
  }
  on_ = on;
  itimerspec spec = {};
  if (on) {
    spec.it_value = spec.it_interval = absl::ToTimespec(kPoll);
  }
  (void)timerfd_settime(fd_.get(), 0, &spec, nullptr);
}

GivenBack::GivenBack(const Sessions* sessions, PollTimer* timer, CoreLoop* reaper)
    : sessions_(sessions), timer_(timer), reaper_(reaper) {}

DoneSignal GivenBack::SignalOf(int rank, uint64_t done) const {
  const Session* session = (*sessions_)[rank].get();
  return {rank, session == nullptr ? 0 : session->id(), done};
}

bool GivenBack::HasCome(const DoneSignal& signal) const {
  const Session* session = (*sessions_)[signal.rank].get();
  return signal.done == 0 || session == nullptr || session->id() != signal.session_id ||
         session->words().HasDone(signal.done);
}

bool GivenBack::HaveCome(const std::vector<DoneSignal>& signals) const {
  return std::all_of(signals.begin(), signals.end(), [this](const DoneSignal& signal) { return HasCome(signal); });
}

absl::Status GivenBack::When(Held held) {
  const bool first = std::none_of(held_.begin(), held_.end(), [&held](const Held& before) {
    return before.order == held.order && held.order != Held::Order::kFills;
  });
  if (first && HaveCome(held.signals)) {
    return held.run();
  }
  timer_->On();
  held.since = MonotonicNow();
  held_.push_back(std::move(held));
  return absl::OkStatus();
}

bool GivenBack::RunNext(absl::Status* status) {
  bool blocked[3] = {};
  for (auto it = held_.begin(); it != held_.end(); ++it) {
    bool& behind = blocked[static_cast<int>(it->order)];
    if ((behind && it->order != Held::Order::kFills) || !HaveCome(it->signals)) {
      behind = true;
      continue;
    }
    std::list<Held> taken;
    taken.splice(taken.begin(), held_, it);  // `run` may add some, or drop all
    *status = taken.front().run();
    return true;
  }
  return false;
}

void GivenBack::Drop() {
  std::list<Held> gone = std::exchange(held_, {});
  for (Held& held : gone) {
    if (held.dropped) {
      held.dropped();
    }
  }
  if (!gone.empty()) {
    reaper_->Post([gone = std::move(gone)] {});
  }
}

GivenBack::Late GivenBack::FindLate(absl::Time now, absl::Duration limit) const {
  for (const Held& held : held_) {
    for (const DoneSignal& signal : held.signals) {
      if (now - held.since >= limit && !HasCome(signal)) {
        return {held.what, signal, now - held.since};
      }
    }
  }
  return {};
}

}  // namespace shardd
