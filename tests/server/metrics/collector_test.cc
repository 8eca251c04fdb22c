// How often the daemon is asked, however many scrape.

#include "server/metrics/collector.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "tests/testing/poll.h"

namespace shardd {
namespace {

// Of a metric without labels; -1: there is none.
double ValueOf(const std::vector<prometheus::MetricFamily>& families, const std::string& name) {
  for (const prometheus::MetricFamily& family : families) {
    if (family.name == name) return family.metric.at(0).gauge.value;
  }
  return -1;
}

TEST(CollectorTest, CallsTakeATwentiethOfTheTimeOfAFlood) {
  absl::Time now = absl::UnixEpoch();
  constexpr absl::Duration kCost = absl::Milliseconds(2);
  int asked = 0;
  const Collector collector(
      [&](absl::Duration) {
        ++asked;
        now += kCost;
        return v1::GetMetricsResponse();
      },
      [&] { return now; });
  const absl::Time end = now + absl::Seconds(1);
  while (now < end) {
    EXPECT_EQ(ValueOf(collector.Collect(), "shardd_call_seconds"), 0.002);
    now += absl::Microseconds(100);
  }
  EXPECT_EQ(asked, absl::Seconds(1) / (Collector::kTimesItsCost * kCost));
  now += Collector::kTimesItsCost * kCost;
  (void)collector.Collect();
  EXPECT_EQ(asked, 26) << "no value is of a scrape before";
}

TEST(CollectorTest, ADaemonThatFailsIsAskedAgainSoon) {
  absl::Time now = absl::UnixEpoch();
  int asked = 0;
  const Collector collector(
      [&](absl::Duration limit) -> absl::StatusOr<v1::GetMetricsResponse> {
        if (++asked > 1) return v1::GetMetricsResponse();
        now += limit;
        return absl::DeadlineExceededError("it does not answer");
      },
      [&] { return now; });
  EXPECT_EQ(ValueOf(collector.Collect(), "shardd_up"), 0);
  EXPECT_EQ(ValueOf(collector.Collect(), "shardd_up"), 1);
}

TEST(CollectorTest, WhoScrapesMeanwhileSharesTheCallUnderWay) {
  constexpr int kScrapes = 8;
  std::atomic<int> asked = 0;
  absl::Notification go;
  const Collector collector(
      [&](absl::Duration) {
        ++asked;
        go.WaitForNotification();
        return v1::GetMetricsResponse();
      },
      absl::Now);
  std::atomic<int> begun = 0, up = 0;
  std::vector<std::thread> scrapes;
  for (int i = 0; i < kScrapes; ++i) {
    scrapes.emplace_back([&] {
      ++begun;
      if (ValueOf(collector.Collect(), "shardd_up") == 1) ++up;
    });
  }
  EXPECT_TRUE(testing::PollUntil([&] { return begun == kScrapes && asked == 1; }));
  go.Notify();
  for (std::thread& scrape : scrapes) scrape.join();
  EXPECT_EQ(up, kScrapes);
  EXPECT_LE(asked, 2) << "one that began late may come behind it";
}

}  // namespace
}  // namespace shardd
