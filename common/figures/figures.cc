#include "common/figures/figures.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace shardd {
namespace {

constexpr double kNsOfSecond = 1e9;
double Seconds(int64_t ns) { return static_cast<double>(ns) / kNsOfSecond; }

uint64_t CountOf(const v1::Durations& durations) {
  return std::accumulate(durations.counts().begin(), durations.counts().end(), uint64_t{0});
}

using Phases = std::array<int64_t, kPhaseNames.size()>;
Phases SumsOf(const v1::StepMetrics& steps) {
  return {steps.forward().sum_ns(),   steps.backward().sum_ns(),  steps.waiting().sum_ns(),
          steps.reduction().sum_ns(), steps.optimizer().sum_ns(), steps.commit().sum_ns()};
}
Phases SumsOf(const v1::StepRecord& step) {
  return {step.forward_ns(),   step.backward_ns(),  step.waiting_ns(),
          step.reduction_ns(), step.optimizer_ns(), step.commit_ns()};
}

// Time that was waited for each rank; the last one: for ranks without a count of their own.
std::vector<int64_t> AwaitedNs(const v1::JobMetrics& job) {
  std::vector<int64_t> awaited(static_cast<size_t>(std::max(0, job.world_size())) + 1);
  for (const v1::RankWait& wait : job.waits()) {
    const bool is_counted = wait.awaited() >= 0 && wait.awaited() < job.world_size();
    awaited[is_counted ? static_cast<size_t>(wait.awaited()) : awaited.size() - 1] += wait.wait_ns();
  }
  return awaited;
}

bool Continues(const v1::JobMetrics& now, const v1::JobMetrics& before) {
  return now.world_size() == before.world_size() && now.steps().committed() >= before.steps().committed() &&
         now.steps().duration().sum_ns() >= before.steps().duration().sum_ns() &&
         now.counters().commands() >= before.counters().commands();
}

// Of all others' time, of which there is `each_ns` a rank.
double ShareOf(int64_t waited_ns, int64_t each_ns, int ranks) {
  const double all = static_cast<double>(each_ns) * std::max(1, ranks - 1);
  return all > 0 ? std::min(1.0, static_cast<double>(waited_ns) / all) : 0;
}

void TakeLast(const v1::JobMetrics& job, JobFigures* out) {
  const v1::StepRecord& last = job.steps().last();
  out->step_s = Seconds(last.duration_ns());
  const Phases sums = SumsOf(last);
  std::transform(sums.begin(), sums.end(), out->phases_s.begin(), Seconds);
  const int rank = last.slowest_rank();
  if (rank < 0 || rank >= job.world_size() || last.slowest_rank_ns() <= 0) return;
  out->slowest = {rank, ShareOf(last.slowest_rank_ns(), last.duration_ns(), job.world_size())};
  out->awaited[static_cast<size_t>(rank)] = out->slowest.share;
}

void TakeBetween(const v1::JobMetrics& now, const v1::JobMetrics& before, uint64_t steps, JobFigures* out) {
  const int64_t took_ns = now.steps().duration().sum_ns() - before.steps().duration().sum_ns();
  const auto of_step = [&](int64_t ns) { return Seconds(ns) / static_cast<double>(steps); };
  out->step_s = of_step(took_ns);
  const Phases sums = SumsOf(now.steps()), former = SumsOf(before.steps());
  for (size_t i = 0; i < sums.size(); ++i) out->phases_s[i] = of_step(sums[i] - former[i]);
  const std::vector<int64_t> awaited = AwaitedNs(now), awaited_before = AwaitedNs(before);
  const size_t others = awaited.size() - 1;
  for (size_t rank = 0; rank < awaited.size(); ++rank) {
    const double share = ShareOf(awaited[rank] - awaited_before[rank], took_ns, now.world_size());
    if (rank < others) out->awaited[rank] = share;
    if (share <= out->slowest.share) continue;
    // Of those that have no count, the daemon names the one of the last step.
    out->slowest = {rank < others ? static_cast<int>(rank) : now.steps().last().slowest_rank(), share};
  }
}

}  // namespace

JobFigures FiguresOf(const v1::JobMetrics& now, const v1::JobMetrics* before) {
  JobFigures figures;
  figures.awaited.resize(static_cast<size_t>(std::max(0, now.world_size())));
  if (!now.steps().has_last()) return figures;
  const uint64_t steps = before == nullptr || !Continues(now, *before)
                             ? 0
                             : CountOf(now.steps().duration()) - CountOf(before->steps().duration());
  if (steps > 0) {
    TakeBetween(now, *before, steps, &figures);
  } else {
    TakeLast(now, &figures);
  }
  const double pace_s = std::max(figures.step_s, Seconds(now.time().since_commit_ns()));
  figures.steps_per_s = pace_s > 0 ? 1 / pace_s : 0;
  return figures;
}

double GoodputOf(const v1::JobTime& time) {
  const int64_t all = time.starting_ns() + time.committed_ns() + time.slow_rank_ns() + time.dropped_ns() +
                      time.absent_ns() + time.idle_ns();
  if (all <= 0) return -1;
  return static_cast<double>(std::max<int64_t>(time.committed_ns() - time.taken_back_ns(), 0)) /
         static_cast<double>(all);
}

double LostSecondsOf(const v1::JobTime& time) { return Seconds(time.dropped_ns() + time.taken_back_ns()); }

}  // namespace shardd
