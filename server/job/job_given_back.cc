// What waits for ranks' GPUs: see given_back.h.

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/job/given_back.h"
#include "server/job/job_core.h"

namespace shardd {

int PollTimer::fd() {
  if (!fd_.valid()) {
    fd_ = UniqueFd(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  }
  return fd_.get();
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

void PollTimer::Clear() {
  uint64_t expired = 0;
  [[maybe_unused]] const ssize_t n = read(fd_.get(), &expired, sizeof(expired));
}

DoneSignal JobCore::SignalOf(int rank, uint64_t done) const {
  const Session* session = sessions_[rank].get();
  return {rank, session == nullptr ? 0 : session->id(), done};
}

bool JobCore::HasCome(const DoneSignal& signal) const {
  const Session* session = sessions_[signal.rank].get();
  return signal.done == 0 || session == nullptr || session->id() != signal.session_id ||
         session->words().HasDone(signal.done);
}

bool JobCore::HaveCome(const std::vector<DoneSignal>& signals) const {
  return std::all_of(signals.begin(), signals.end(), [this](const DoneSignal& signal) { return HasCome(signal); });
}

absl::Status JobCore::WhenGivenBack(Held held) {
  const bool first = std::none_of(held_.begin(), held_.end(), [&held](const Held& before) {
    return before.order == held.order && held.order != Held::Order::kFills;
  });
  if (first && HaveCome(held.signals)) {
    return held.run();
  }
  PollSoon();
  held.since = MonotonicNow();
  held_.push_back(std::move(held));
  return absl::OkStatus();
}

void JobCore::PollSoon() {
  if (!poll_watched_ && poll_timer_.fd() >= 0) {
    // Nothing but a reason for the loop to go round: PollRings looks at what is held, and at sums.
    loop_->AddFd(poll_timer_.fd(), [this] { poll_timer_.Clear(); });
    poll_watched_ = true;
  }
  poll_timer_.Set(true);
}

void JobCore::PollNoMore() {
  if (held_.empty() && !sums_.waiting()) {
    poll_timer_.Set(false);
  }
}

bool JobCore::RunGivenBack() {
  bool found = false;
  bool blocked[3] = {};
  for (auto it = held_.begin(); it != held_.end();) {
    bool& behind = blocked[static_cast<int>(it->order)];
    if ((behind && it->order != Held::Order::kFills) || !HaveCome(it->signals)) {
      behind = true;
      ++it;
      continue;
    }
    found = true;
    std::list<Held> taken;
    taken.splice(taken.begin(), held_, it);
    const uint64_t epoch = committed_.epoch();
    absl::Status status = taken.front().run();
    if (!status.ok() && epoch == committed_.epoch()) {
      Abort(std::move(status), {});
    }
    Advance();
    if (epoch != committed_.epoch()) {
      return true;
    }
    std::fill(std::begin(blocked), std::end(blocked), false);
    it = held_.begin();  // it may have added some, or dropped
  }
  PollNoMore();
  return found;
}

void JobCore::DropGivenBack() {
  std::list<Held> gone = std::exchange(held_, {});
  for (Held& held : gone) {
    if (held.dropped) {
      held.dropped();
    }
  }
  if (!gone.empty()) {  // with the memory of sessions
    memory_worker_->Post([gone = std::move(gone)] {});
  }
  poll_timer_.Set(false);
  if (std::exchange(poll_watched_, false)) {
    loop_->RemoveFd(poll_timer_.fd());
  }
}

absl::Status JobCore::CheckHeld(absl::Time now, int* rank) const {
  const absl::Duration limit = absl::Milliseconds(plan_->config.silence_timeout_ms());
  for (const Held& held : held_) {
    if (now - held.since < limit) {
      continue;
    }
    for (const DoneSignal& signal : held.signals) {
      if (!HasCome(signal)) {
        *rank = signal.rank;
        return RankError(
            absl::StatusCode::kDeadlineExceeded, signal.rank, held.what,
            absl::StrCat("the stream of rank ", signal.rank, " on ", devices_[signal.rank]->name(),
                         " has not come to signal ", signal.done, ", behind which it has given the memory back, after ",
                         absl::FormatDuration(now - held.since),
                         " (last command: ", sessions_[signal.rank]->last_command, ")"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace shardd
