#include "server/job/meter/goodput.h"

#include <algorithm>

namespace shardd {

void Goodput::Begin(absl::Time now) {
  (state_ == State::kStarting ? starting_ : absent_) += now - since_;
  state_ = State::kRunning;
  since_ = now;
}

absl::Duration Goodput::Committed(int64_t step, absl::Duration for_one, bool updated, absl::Time now) {
  TakenBack(step - 1);
  const absl::Duration duration = running() ? now - since_ : absl::ZeroDuration();
  const absl::Duration waited = std::min(for_one, duration);
  for_one_ += waited;
  committed_ += duration - waited;
  if (step <= begun_) redone_ += duration;
  (updated ? updated_steps_ : skipped_steps_) += 1;
  step_ = step;
  begun_ = std::max(begun_, step);
  durations_[static_cast<size_t>(step) % kRemembered] = duration;
  remembered_ = std::min<int64_t>(remembered_ + 1, kRemembered);
  last_commit_ = now;
  if (running()) since_ = now;
  return duration;
}

void Goodput::EpochEnds(bool dropped, absl::Time now) {
  if (!running()) return;  // its time goes on
  (dropped ? dropped_ : idle_) += now - since_;
  dropped_steps_ += dropped ? 1 : 0;
  if (dropped) begun_ = std::max(begun_, step_ + 1);
  state_ = State::kAbsent;
  since_ = now;
}

void Goodput::TakenBack(int64_t step) {
  absl::Duration known;
  int64_t count = 0;
  for (; step_ > step && remembered_ > 0; --step_, --remembered_, ++count) {
    known += durations_[static_cast<size_t>(step_) % kRemembered];
  }
  taken_back_ += known;
  taken_back_steps_ += count;
  if (step_ > step) {  // they are forgotten, or were another daemon's, of which nothing is known
    const int64_t others = std::min(step_ - step, updated_steps_ + skipped_steps_ - taken_back_steps_);
    if (count > 0 && others > 0) taken_back_ += known / count * others;
    taken_back_steps_ += step_ - step;
    step_ = step;
  }
}

void Goodput::Describe(absl::Time now, v1::JobTime* time, v1::StepMetrics* steps) const {
  const auto ns = [](absl::Duration duration) { return absl::ToInt64Nanoseconds(duration); };
  const auto with = [&](absl::Duration sum, State state) { return ns(state_ == state ? sum + (now - since_) : sum); };
  time->set_starting_ns(with(starting_, State::kStarting));
  time->set_committed_ns(ns(committed_));
  time->set_slow_rank_ns(ns(for_one_));
  time->set_dropped_ns(ns(dropped_));
  time->set_absent_ns(with(absent_, State::kAbsent));
  time->set_idle_ns(ns(idle_));
  time->set_running_ns(with(absl::ZeroDuration(), State::kRunning));
  time->set_taken_back_ns(ns(taken_back_));
  time->set_redone_ns(ns(redone_));
  time->set_since_commit_ns(last_commit_ == absl::InfinitePast() ? -1 : ns(now - last_commit_));
  steps->set_committed(updated_steps_);
  steps->set_skipped(skipped_steps_);
  steps->set_dropped(dropped_steps_);
  steps->set_taken_back(taken_back_steps_);
}

}  // namespace shardd
