#include "common/clock/timed_condition.h"

#include <gtest/gtest.h>

#include <thread>

#include "common/clock/deadline.h"
#include "common/clock/monotonic_now.h"

namespace shardd {
namespace {

TEST(DeadlineTest, OneThatHasPassedLeavesNothing) {
  for (const absl::Duration limit : {absl::ZeroDuration(), -absl::Seconds(1), -absl::InfiniteDuration()}) {
    EXPECT_TRUE(Deadline::In(limit).HasPassed());
    EXPECT_EQ(Deadline::In(limit).Left(), absl::ZeroDuration());
  }
}

TEST(DeadlineTest, NeverIsBehindEveryOther) {
  EXPECT_EQ(Deadline::Never().Left(), absl::InfiniteDuration());
  EXPECT_EQ(Deadline::In(absl::InfiniteDuration()).Left(), absl::InfiniteDuration());
  EXPECT_FALSE(Deadline::Never().HasPassed());
  EXPECT_LT(Deadline::In(absl::Hours(24 * 365)), Deadline::Never());
}

TEST(TimedConditionTest, AWaitEndsAsSoonAsItsConditionHolds) {
  absl::Mutex mutex;
  TimedCondition changed;
  int value = 0;
  std::thread other([&] {
    for (int i = 0; i < 1000; ++i) {
      absl::MutexLock lock(&mutex);
      ++value;
      changed.NotifyAll();
    }
  });
  {
    absl::MutexLock lock(&mutex);
    EXPECT_TRUE(changed.Await(
        &mutex, [&] { return value == 1000; }, Deadline::Never()));
    EXPECT_EQ(value, 1000);
  }
  other.join();
}

TEST(TimedConditionTest, AWaitForNothingEndsAtItsDeadline) {
  absl::Mutex mutex;
  TimedCondition changed;
  const absl::Time begin = MonotonicNow();
  absl::MutexLock lock(&mutex);
  EXPECT_FALSE(changed.Await(
      &mutex, [] { return false; }, Deadline::In(absl::Milliseconds(20))));
  EXPECT_GE(MonotonicNow() - begin, absl::Milliseconds(20));
  EXPECT_TRUE(changed.Await(
      &mutex, [] { return true; }, Deadline::In(absl::ZeroDuration())));
}

}  // namespace
}  // namespace shardd
