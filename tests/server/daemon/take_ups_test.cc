#include "server/daemon/take_up/take_ups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "tests/testing/poll.h"

namespace shardd {
namespace {

using Jobs = std::map<TakeUps::Name, std::vector<TakeUps::TakeUp>>;

const TakeUps::Name kLong(1000, "long");
const TakeUps::Name kShort(1001, "short");

Jobs Of(const TakeUps::Name& name, TakeUps::TakeUp take_up) {
  Jobs jobs;
  jobs[name].push_back(std::move(take_up));
  return jobs;
}

void Describe(const TakeUps::Name& name, TakeUps* take_ups) {
  v1::Job job;
  job.set_name(name.second);
  job.set_committed_step(7);
  take_ups->Describe(Tenant{name.first}, std::move(job));
}

std::string Listed(const TakeUps& take_ups) {
  std::string listed;
  take_ups.List([&](const Tenant& owner, const v1::Job& job) {
    absl::StrAppend(&listed, owner.uid, " ", job.name(), " ", job.committed_step(), ";");
  });
  return listed;
}

TEST(TakeUps, AJobThatTakesLongKeepsNoOtherWaiting) {
  absl::Notification go_on, long_came;
  std::atomic<bool> short_came = false;
  TakeUps take_ups;
  Jobs jobs = Of(kLong, [&] {
    Describe(kLong, &take_ups);
    go_on.WaitForNotification();
  });
  jobs[kShort].push_back([] {});
  take_ups.Begin(std::move(jobs), absl::Milliseconds(50));
  take_ups.WhenTakenUp(kLong, [&] { long_came.Notify(); });
  ASSERT_TRUE(testing::PollUntil([&] { return take_ups.count() == 1; }));
  take_ups.WhenTakenUp(kShort, [&] { short_came = true; });
  EXPECT_TRUE(short_came);
  EXPECT_FALSE(long_came.HasBeenNotified());
  EXPECT_THAT(std::string(take_ups.Check("job \"long\"", kLong).message()),
              ::testing::HasSubstr("job \"long\": it is being taken up"));
  EXPECT_TRUE(absl::IsUnavailable(take_ups.Check("", kLong)));
  EXPECT_TRUE(take_ups.Check("", {kLong.first, "lon"}).ok());
  EXPECT_TRUE(take_ups.Check("", {kShort.first, "long"}).ok());
  EXPECT_TRUE(take_ups.Check("", kShort).ok());
  EXPECT_EQ(Listed(take_ups), "1000 long 7;");
  go_on.Notify();
  long_came.WaitForNotification();
  EXPECT_EQ(take_ups.count(), 0u);
  EXPECT_TRUE(take_ups.Check("", kLong).ok());
  EXPECT_EQ(Listed(take_ups), "");
}

// Ranks ask for their job before they know anything else of the daemon.
TEST(TakeUps, BeginReturnsNotBeforeEachIsDescribed) {
  TakeUps take_ups;
  absl::Notification go_on;
  take_ups.Begin(Of(kLong,
                    [&] {
                      absl::SleepFor(absl::Milliseconds(100));
                      Describe(kLong, &take_ups);
                      go_on.WaitForNotification();
                    }),
                 absl::ZeroDuration());
  EXPECT_EQ(Listed(take_ups), "1000 long 7;");
  go_on.Notify();
}

TEST(TakeUps, BeginReturnsWhenAllAreTakenUp) {
  std::atomic<int> taken = 0;
  TakeUps take_ups;
  Jobs jobs;
  for (uint32_t uid = 0; uid < 100; ++uid) jobs[{uid, "job"}].push_back([&] { ++taken; });
  take_ups.Begin(std::move(jobs), absl::Minutes(1));
  EXPECT_EQ(taken, 100);
  EXPECT_EQ(take_ups.count(), 0u);
}

TEST(TakeUps, JobsOfANameAreOneAfterTheOther) {
  std::string order;  // of one thread at a time
  TakeUps take_ups;
  Jobs jobs = Of(kLong, [&] { order += "earlier "; });
  jobs[kLong].push_back([&] { order += "later"; });
  take_ups.Begin(std::move(jobs), absl::Minutes(1));
  EXPECT_EQ(order, "earlier later");
}

TEST(TakeUps, StopDropsWhatWaitsAndSaysWhatIsLeft) {
  auto* const go_on = new absl::Notification;  // a thread that is left has it
  auto* const take_ups = new TakeUps;
  bool came = false;
  take_ups->Begin(Of(kLong,
                     [go_on, take_ups] {
                       Describe(kLong, take_ups);
                       go_on->WaitForNotification();
                     }),
                  absl::ZeroDuration());
  take_ups->WhenTakenUp(kLong, [&came] { came = true; });
  EXPECT_FALSE(take_ups->Stop(absl::Milliseconds(20)));
  EXPECT_EQ(take_ups->count(), 0u);
  go_on->Notify();
  EXPECT_FALSE(came);
}

TEST(TakeUps, OfNoJobsNothingWaits) {
  TakeUps take_ups;
  bool came = false;
  take_ups.WhenTakenUp(kLong, [&] { came = true; });
  EXPECT_TRUE(came);
  take_ups.Begin({}, absl::InfiniteDuration());
  EXPECT_TRUE(take_ups.Stop(absl::InfiniteDuration()));
}

}  // namespace
}  // namespace shardd
