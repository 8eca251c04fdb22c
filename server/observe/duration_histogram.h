#ifndef SHARDD_SERVER_OBSERVE_DURATION_HISTOGRAM_H_
#define SHARDD_SERVER_OBSERVE_DURATION_HISTOGRAM_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"

namespace shardd {

// Counts durations by size. A duration costs a search of nineteen bounds and two additions; nothing is allocated.
// Thread-compatible.
class DurationHistogram {
 public:
  // Upper bounds, included: from what a reduction of a small group takes to what a step of a large model does.
  static constexpr std::array<int64_t, 19> kBoundsNs = {
      100'000,       250'000,        500'000,        1'000'000,      2'500'000,      5'000'000,     10'000'000,
      25'000'000,    50'000'000,     100'000'000,    250'000'000,    500'000'000,    1'000'000'000, 2'500'000'000,
      5'000'000'000, 10'000'000'000, 30'000'000'000, 60'000'000'000, 300'000'000'000};

  // Negative durations count as zero.
  void Add(absl::Duration duration) {
    const int64_t ns = duration > absl::ZeroDuration() ? absl::ToInt64Nanoseconds(duration) : 0;
    size_t bucket = 0;
    while (bucket < kBoundsNs.size() && ns > kBoundsNs[bucket]) ++bucket;
    ++counts_[bucket];
    sum_ns_ += ns;
  }

  // By bucket; the last is of what is longer than every bound.
  const std::array<uint64_t, kBoundsNs.size() + 1>& counts() const { return counts_; }
  int64_t sum_ns() const { return sum_ns_; }

 private:
  std::array<uint64_t, kBoundsNs.size() + 1> counts_ = {};
  int64_t sum_ns_ = 0;
};

// As GetMetrics says it: v1::Durations.
template <typename Durations>
void Describe(const DurationHistogram& histogram, Durations* out) {
  out->mutable_bounds_ns()->Assign(DurationHistogram::kBoundsNs.begin(), DurationHistogram::kBoundsNs.end());
  out->mutable_counts()->Assign(histogram.counts().begin(), histogram.counts().end());
  out->set_sum_ns(histogram.sum_ns());
}

}  // namespace shardd

#endif  // SHARDD_SERVER_OBSERVE_DURATION_HISTOGRAM_H_
