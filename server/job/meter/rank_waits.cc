#include "server/job/meter/rank_waits.h"

#include <algorithm>

namespace shardd {

RankWaits::RankWaits(int ranks) : ranks_(ranks), by_awaited_in_step_(ranks) {
  totals_.resize(static_cast<size_t>(in_pairs() ? ranks * ranks : std::min(ranks, kMostAwaited) + 1));
}

void RankWaits::Begin(int rank, bool sleeps, absl::Time now) {
  Rank& of = ranks_[static_cast<size_t>(rank)];
  of.since = now;
  of.sleeps = sleeps;
  sleeping_ += sleeps ? 1 : 0;
  if (++waiting_ == count() - 1) all_but_one_since_ = now;
}

void RankWaits::End(int rank, int awaited, absl::Time now) {
  if (waiting_-- == count() - 1) {
    if (awaited >= 0) for_one_in_step_ += now - all_but_one_since_;
    all_but_one_since_ = absl::InfiniteFuture();
  }
  Rank& of = ranks_[static_cast<size_t>(rank)];
  const absl::Duration waited = now - of.since;
  const bool slept = of.sleeps;
  sleeping_ -= slept ? 1 : 0;
  of.since = absl::InfiniteFuture();
  of.sleeps = false;
  if (awaited < 0) return;
  in_step_ += waited;
  if (slept) asleep_in_step_ += waited;
  by_awaited_in_step_[static_cast<size_t>(awaited)] += waited;
  totals_[static_cast<size_t>(in_pairs() ? rank * count() + awaited : std::min(awaited, kMostAwaited))] += waited;
}

void RankWaits::Arrive(int rank, absl::Time now) {
  GoOn(rank, now);
  if (waits(rank)) {
    ++ranks_[static_cast<size_t>(rank)].ahead;
    return;
  }
  if (waiting_ < count() - 1) {
    Begin(rank, /*sleeps=*/false, now);
    return;
  }
  for (int other = 0; other < count(); ++other) {
    if (other != rank) End(other, rank, now);
  }
  for (int other = 0; other < count(); ++other) {
    int& ahead = ranks_[static_cast<size_t>(other)].ahead;
    if (ahead == 0) continue;
    --ahead;
    Begin(other, /*sleeps=*/false, now);
  }
}

void RankWaits::Sleep(int rank, absl::Time now) {
  // Were all asleep, none would be awaited: the job then adds what it has (AddBeforeTurn).
  if (!waits(rank) && waiting_ < count() - 1) Begin(rank, /*sleeps=*/true, now);
}

void RankWaits::Wake(int by, absl::Time now, absl::FunctionRef<bool(int rank)> still_sleeping) {
  for (int rank = 0; rank < count(); ++rank) {
    if (ranks_[static_cast<size_t>(rank)].sleeps && !still_sleeping(rank)) End(rank, rank == by ? -1 : by, now);
  }
}

void RankWaits::Drop() {
  std::fill(ranks_.begin(), ranks_.end(), Rank());
  waiting_ = sleeping_ = 0;
  all_but_one_since_ = absl::InfiniteFuture();
  BeginStep();
}

int RankWaits::most_awaited_in_step() const {
  const auto most = std::max_element(by_awaited_in_step_.begin(), by_awaited_in_step_.end());
  return *most > absl::ZeroDuration() ? static_cast<int>(most - by_awaited_in_step_.begin()) : -1;
}

void RankWaits::BeginStep() {
  in_step_ = asleep_in_step_ = for_one_in_step_ = absl::ZeroDuration();
  std::fill(by_awaited_in_step_.begin(), by_awaited_in_step_.end(), absl::ZeroDuration());
}

void RankWaits::Describe(v1::JobMetrics* out) const {
  const int columns = in_pairs() ? count() : static_cast<int>(totals_.size());
  for (size_t at = 0; at < totals_.size(); ++at) {
    if (totals_[at] == absl::ZeroDuration()) continue;
    const int row = static_cast<int>(at) / columns;
    const int awaited = static_cast<int>(at) % columns;
    v1::RankWait* const wait = out->add_waits();
    wait->set_rank(in_pairs() ? row : -1);
    wait->set_awaited(in_pairs() || awaited < kMostAwaited ? awaited : -1);
    wait->set_wait_ns(absl::ToInt64Nanoseconds(totals_[at]));
  }
}

}  // namespace shardd
