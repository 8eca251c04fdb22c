#include "server/observe/duration_histogram.h"

#include <gtest/gtest.h>

#include <numeric>

#include "shardd/v1/jobs.pb.h"

namespace shardd {
namespace {

TEST(DurationHistogramTest, ABoundBelongsToItsBucket) {
  DurationHistogram histogram;
  histogram.Add(absl::Milliseconds(1));
  histogram.Add(absl::Milliseconds(1) + absl::Nanoseconds(1));
  histogram.Add(absl::Hours(1));
  histogram.Add(absl::Seconds(-1));
  EXPECT_EQ(histogram.counts()[3], 1u) << "1 ms";
  EXPECT_EQ(histogram.counts()[4], 1u) << "2.5 ms";
  EXPECT_EQ(histogram.counts().back(), 1u) << "longer than every bound";
  EXPECT_EQ(histogram.counts()[0], 1u) << "a clock that went back";
  EXPECT_EQ(histogram.sum_ns(), 3'600'002'000'001);
}

TEST(DurationHistogramTest, ItsDescriptionHasABucketMoreThanBounds) {
  DurationHistogram histogram;
  histogram.Add(absl::Seconds(2));
  v1::Durations durations;
  Describe(histogram, &durations);
  EXPECT_EQ(durations.counts_size(), durations.bounds_ns_size() + 1);
  EXPECT_EQ(std::accumulate(durations.counts().begin(), durations.counts().end(), uint64_t{0}), 1u);
  EXPECT_TRUE(std::is_sorted(durations.bounds_ns().begin(), durations.bounds_ns().end()));
}

}  // namespace
}  // namespace shardd
