#include "server/job/meter/step_phases.h"

#include <algorithm>

namespace shardd {

void StepPhases::Begin(absl::Time now) {
  began_ = all_closed_ = now;
  forward_sum_ = backward_sum_ = optimizer_sum_ = absl::ZeroDuration();
  std::fill(ranks_.begin(), ranks_.end(), Rank{now});
}

void StepPhases::Add(int rank, absl::Duration* sum, absl::Time now) {
  *sum += now - of(rank).since;
  of(rank).since = now;
}

void StepPhases::BeginBackward(int rank, absl::Time now) {
  Add(rank, &forward_sum_, now);
  of(rank).in_backward = of(rank).had_backward = true;
}

void StepPhases::CloseBackward(int rank, absl::Time now) {
  Add(rank, of(rank).in_backward ? &backward_sum_ : &forward_sum_, now);
  of(rank).in_backward = false;
}

void StepPhases::CloseStep(int rank, absl::Time now) {
  const bool updates = trainers_update_ && !of(rank).in_backward;
  Add(rank, updates ? &optimizer_sum_ : of(rank).had_backward ? &backward_sum_ : &forward_sum_, now);
  all_closed_ = now;
}

v1::StepRecord StepPhases::Commit(absl::Time now, const Waited& waited, const Decided& decided) {
  const int64_t ranks = static_cast<int64_t>(ranks_.size());
  // At the end ranks wait for the last one's Step. Who sleeps for a slot is in a backward; who waits for a pass, or for
  // full parameters, in a forward.
  const absl::Duration at_end = ranks * (all_closed_ - began_) - forward_sum_ - backward_sum_ - optimizer_sum_;
  const auto within = [](absl::Duration wait, absl::Duration sum) {
    return std::clamp(wait, absl::ZeroDuration(), sum);
  };
  const absl::Duration in_backward = within(waited.asleep, backward_sum_);
  const absl::Duration in_forward = within(waited.total - waited.asleep - at_end, forward_sum_);
  const absl::Time measuring = std::clamp(decided.measuring, all_closed_, now);
  const absl::Time applied = std::clamp(decided.applied, measuring, now);
  v1::StepRecord record;
  const auto observe = [](absl::Duration duration, DurationHistogram* histogram) {
    histogram->Add(duration);
    return absl::ToInt64Nanoseconds(duration);
  };
  record.set_duration_ns(observe(now - began_, &duration_));
  record.set_forward_ns(observe((forward_sum_ - in_forward) / ranks, &forward_));
  record.set_backward_ns(observe((backward_sum_ - in_backward) / ranks, &backward_));
  record.set_waiting_ns(observe((at_end + in_backward + in_forward) / ranks, &waiting_));
  record.set_optimizer_ns(observe(optimizer_sum_ / ranks + (applied - measuring), &optimizer_));
  record.set_reduction_ns(observe(measuring - all_closed_, &reduction_));
  record.set_commit_ns(observe(now - applied, &commit_));
  Begin(now);
  return record;
}

void StepPhases::Describe(v1::StepMetrics* out) const {
  shardd::Describe(duration_, out->mutable_duration());
  shardd::Describe(forward_, out->mutable_forward());
  shardd::Describe(backward_, out->mutable_backward());
  shardd::Describe(optimizer_, out->mutable_optimizer());
  shardd::Describe(waiting_, out->mutable_waiting());
  shardd::Describe(reduction_, out->mutable_reduction());
  shardd::Describe(commit_, out->mutable_commit());
}

}  // namespace shardd
