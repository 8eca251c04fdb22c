#include "server/metrics/families.h"

#include <limits>

namespace shardd {

prometheus::ClientMetric* Families::Add(absl::string_view name, absl::string_view help, prometheus::MetricType type,
                                        const Labels& labels) {
  auto found = families_.find(name);
  if (found == families_.end()) {
    found = families_.emplace(std::string(name), prometheus::MetricFamily()).first;
    found->second.name = std::string(name);
    found->second.help = std::string(help);
    found->second.type = type;
  }
  prometheus::ClientMetric& metric = found->second.metric.emplace_back();
  for (const auto& [label, value] : labels) metric.label.push_back({std::string(label), value});
  return &metric;
}

void Families::Counter(absl::string_view name, absl::string_view help, const Labels& labels, double value) {
  Add(name, help, prometheus::MetricType::Counter, labels)->counter.value = value;
}

void Families::Gauge(absl::string_view name, absl::string_view help, const Labels& labels, double value) {
  Add(name, help, prometheus::MetricType::Gauge, labels)->gauge.value = value;
}

void Families::Histogram(absl::string_view name, absl::string_view help, const Labels& labels,
                         const v1::Durations& durations) {
  auto& histogram = Add(name, help, prometheus::MetricType::Histogram, labels)->histogram;
  for (int bucket = 0; bucket < durations.counts_size(); ++bucket) {
    histogram.sample_count += durations.counts(bucket);
    const bool bounded = bucket < durations.bounds_ns_size();
    histogram.bucket.push_back(
        {histogram.sample_count, bounded ? static_cast<double>(durations.bounds_ns(bucket)) / kNsOfSecond
                                         : std::numeric_limits<double>::infinity()});
  }
  histogram.sample_sum = static_cast<double>(durations.sum_ns()) / kNsOfSecond;
}

std::vector<prometheus::MetricFamily> Families::Take() {
  std::vector<prometheus::MetricFamily> taken;
  for (auto& [name, family] : families_) taken.push_back(std::move(family));
  families_.clear();
  return taken;
}

}  // namespace shardd
