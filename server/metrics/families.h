#ifndef SHARDD_SERVER_METRICS_FAMILIES_H_
#define SHARDD_SERVER_METRICS_FAMILIES_H_

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "prometheus/metric_family.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// Metrics that are being put together: each name is one family, with its labels. A metric that has no value now (the
// last commit of a job without one) is left out. Thread-compatible.
class Families {
 public:
  using Labels = std::vector<std::pair<absl::string_view, std::string>>;

  // `help`: one sentence. The same name has the same help wherever it is added.
  void Counter(absl::string_view name, absl::string_view help, const Labels& labels, double value);
  void Gauge(absl::string_view name, absl::string_view help, const Labels& labels, double value);
  // In seconds.
  void Histogram(absl::string_view name, absl::string_view help, const Labels& labels, const v1::Durations& durations);

  // By name. Nothing is left here.
  std::vector<prometheus::MetricFamily> Take();

 private:
  prometheus::ClientMetric* Add(absl::string_view name, absl::string_view help, prometheus::MetricType type,
                                const Labels& labels);

  std::map<std::string, prometheus::MetricFamily, std::less<>> families_;
};

constexpr double kNsOfSecond = 1e9;

// Of the daemon, and what is added up over jobs.
void AddDaemon(const v1::GetMetricsResponse& metrics, Families* out);
void AddJob(const v1::JobMetrics& job, Families* out);

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_FAMILIES_H_
