#ifndef SHARDD_SERVER_METRICS_COLLECTOR_H_
#define SHARDD_SERVER_METRICS_COLLECTOR_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// A scrape is a call of the daemon, and no value is kept for a later one. But however many scrape, one call is under
// way at a time, and calls take a twentieth of the daemon's time: scrapes meanwhile, milliseconds later, share its
// answer. A daemon that does not answer is shardd_up 0 and nothing else. Thread-safe.
class Collector final : public prometheus::Collectable {
 public:
  // Blocks for so long at most; scrapes time out after ten seconds by default.
  static constexpr absl::Duration kLimit = absl::Seconds(5);
  static constexpr int kTimesItsCost = 20;
  static constexpr absl::Duration kLongestShared = absl::Seconds(1);
  using Ask = std::function<absl::StatusOr<v1::GetMetricsResponse>(absl::Duration limit)>;
  using Clock = std::function<absl::Time()>;  // one that nobody sets
  Collector(Ask ask, Clock clock) : ask_(std::move(ask)), clock_(std::move(clock)) {}

  // By name. Blocks for as long as the daemon takes.
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  struct Answer {
    absl::StatusOr<v1::GetMetricsResponse> metrics;
    absl::Duration took;
  };
  std::shared_ptr<const Answer> Get() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Says it in the log where it is news.
  void Note(const absl::Status& status) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Ask ask_;
  const Clock clock_;
  mutable absl::Mutex mutex_;
  mutable bool asking_ ABSL_GUARDED_BY(mutex_) = false;
  mutable std::shared_ptr<const Answer> answer_ ABSL_GUARDED_BY(mutex_);
  mutable absl::Time shared_until_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  mutable bool fails_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_COLLECTOR_H_
