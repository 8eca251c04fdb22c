#ifndef SHARDD_SERVER_METRICS_COLLECTOR_H_
#define SHARDD_SERVER_METRICS_COLLECTOR_H_

#include <functional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// One scrape is one call of the daemon: nothing is kept, so nothing is stale. A daemon that does not answer is
// shardd_up 0 and nothing else. Thread-safe.
class Collector final : public prometheus::Collectable {
 public:
  // Blocks for so long at most; scrapes time out after ten seconds by default.
  static constexpr absl::Duration kLimit = absl::Seconds(5);
  using Ask = std::function<absl::StatusOr<v1::GetMetricsResponse>(absl::Duration limit)>;
  explicit Collector(Ask ask) : ask_(std::move(ask)) {}

  // By name. Blocks for as long as the daemon takes.
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  // Says it in the log where it is news.
  void Note(const absl::Status& status) const ABSL_LOCKS_EXCLUDED(mutex_);

  const Ask ask_;
  mutable absl::Mutex mutex_;
  mutable bool fails_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_COLLECTOR_H_
