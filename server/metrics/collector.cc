#include "server/metrics/collector.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/metrics/families.h"
#include "server/observe/log.h"

namespace shardd {

std::vector<prometheus::MetricFamily> Collector::Collect() const {
  const auto begin = std::chrono::steady_clock::now();
  const absl::StatusOr<v1::GetMetricsResponse> metrics = ask_(kLimit);
  Note(metrics.status());
  Families families;
  families.Gauge("shardd_up", "1: the daemon answers.", {}, metrics.ok() ? 1 : 0);
  if (metrics.ok()) {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    families.Gauge("shardd_call_seconds", "How long the daemon took to say its figures, at this scrape.", {},
                   took.count());
    AddDaemon(*metrics, &families);
    for (const v1::JobMetrics& job : metrics->jobs()) AddJob(job, &families);
  }
  return families.Take();
}

void Collector::Note(const absl::Status& status) const {
  absl::MutexLock lock(&mutex_);
  if (std::exchange(fails_, !status.ok()) == !status.ok()) return;
  if (status.ok()) {
    LogInfo("the daemon answers again");
  } else {
    LogWarning(absl::StrCat("the daemon does not answer: ", status.ToString()));
  }
}

}  // namespace shardd
