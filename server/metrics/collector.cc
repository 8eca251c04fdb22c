#include "server/metrics/collector.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/metrics/families.h"
#include "server/observe/log.h"

namespace shardd {

std::vector<prometheus::MetricFamily> Collector::Collect() const {
  const std::shared_ptr<const Answer> answer = Get();
  const absl::StatusOr<v1::GetMetricsResponse>& metrics = answer->metrics;
  Families families;
  families.Gauge("shardd_up", "1: the daemon answers.", {}, metrics.ok() ? 1 : 0);
  if (metrics.ok()) {
    families.Gauge("shardd_call_seconds", "How long the daemon took to say its figures, at this scrape.", {},
                   absl::ToDoubleSeconds(answer->took));
    AddDaemon(*metrics, &families);
    for (const v1::JobMetrics& job : metrics->jobs()) AddJob(job, &families);
  }
  return families.Take();
}

std::shared_ptr<const Collector::Answer> Collector::Get() const {
  {
    absl::MutexLock lock(&mutex_);
    if (asking_) {
      const auto came = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !asking_; };
      mutex_.Await(absl::Condition(&came));
      return answer_;
    }
    if (clock_() < shared_until_) return answer_;
    asking_ = true;
  }
  const absl::Time began = clock_();
  absl::StatusOr<v1::GetMetricsResponse> metrics = ask_(kLimit);
  const absl::Duration took = clock_() - began;
  absl::MutexLock lock(&mutex_);
  Note(metrics.status());
  answer_ = std::make_shared<const Answer>(Answer{std::move(metrics), took});
  shared_until_ = began + std::min(kTimesItsCost * took, kLongestShared);
  asking_ = false;
  return answer_;
}

void Collector::Note(const absl::Status& status) const {
  if (std::exchange(fails_, !status.ok()) == !status.ok()) return;
  if (status.ok()) {
    LogInfo("the daemon answers again");
  } else {
    LogWarning(absl::StrCat("the daemon does not answer: ", status.ToString()));
  }
}

}  // namespace shardd
