#include "server/daemon/take_up/take_ups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <optional>
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
constexpr uint64_t kLongId = 5;

Jobs Of(const TakeUps::Name& name, TakeUps::TakeUp take_up) {
  Jobs jobs;
  jobs[name].push_back(std::move(take_up));
  return jobs;
}

void DescribeLong(TakeUps* take_ups) {
  v1::Job job;
  job.set_name(kLong.second);
  job.set_job_id(kLongId);
  job.set_committed_step(7);
  take_ups->Describe(Tenant{kLong.first}, std::move(job));
}

std::string Listed(const TakeUps& take_ups) {
  std::string listed;
  take_ups.List([&](const Tenant& owner, const v1::Job& job) {
    absl::StrAppend(&listed, owner.uid, " ", job.name(), " ", job.committed_step(), ";");
  });
  return listed;
}

TEST(TakeUps, AJobThatTakesLongKeepsNoOtherWaiting) {
  absl::Notification go_on;
  TakeUps take_ups;
  Jobs jobs = Of(kLong, [&] {
    DescribeLong(&take_ups);
    go_on.WaitForNotification();
  });
  jobs[kShort].push_back([] {});
  take_ups.Begin(std::move(jobs), absl::Milliseconds(50));
  ASSERT_TRUE(testing::PollUntil([&] { return take_ups.count() == 1; }));
  EXPECT_TRUE(take_ups.Check("", kShort.first, kShort.second).ok());
  EXPECT_EQ(Listed(take_ups), "1000 long 7;");
  go_on.Notify();
  EXPECT_TRUE(testing::PollUntil([&] { return take_ups.count() == 0; }));
  EXPECT_TRUE(take_ups.CheckAny("").ok());
  EXPECT_EQ(Listed(take_ups), "");
}

TEST(TakeUps, WhoNamesAJobThatIsLeftComesAgain) {
  absl::Notification go_on;
  TakeUps take_ups;
  take_ups.Begin(Of(kLong,
                    [&] {
                      DescribeLong(&take_ups);
                      go_on.WaitForNotification();
                    }),
                 absl::ZeroDuration());
  EXPECT_THAT(std::string(take_ups.Check("job \"long\"", kLong.first, "long").message()),
              ::testing::HasSubstr("job \"long\": it is being taken up"));
  EXPECT_TRUE(absl::IsAborted(take_ups.Check("", std::nullopt, "long")));
  EXPECT_TRUE(take_ups.Check("", kLong.first, "lon").ok());
  EXPECT_TRUE(take_ups.Check("", std::nullopt, "lon").ok());
  EXPECT_TRUE(take_ups.Check("", kShort.first, "long").ok());
  EXPECT_TRUE(absl::IsAborted(take_ups.CheckId("", kLongId)));
  EXPECT_TRUE(take_ups.CheckId("", kLongId + 1).ok());
  EXPECT_TRUE(absl::IsAborted(take_ups.CheckAny("")));
  go_on.Notify();
}

// Ranks ask for their job before they know anything else of the daemon.
TEST(TakeUps, BeginReturnsNotBeforeEachIsDescribed) {
  absl::Notification go_on;
  TakeUps take_ups;
  take_ups.Begin(Of(kLong,
                    [&] {
                      absl::SleepFor(absl::Milliseconds(100));
                      DescribeLong(&take_ups);
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

TEST(TakeUps, StopBeginsNoOtherAndSaysWhatIsLeft) {
  static absl::Notification go_on;  // a thread that is left has these
  static TakeUps& take_ups = *new TakeUps;
  static std::atomic<bool> other_began = false, ended = false;
  Jobs jobs = Of(kLong, [] {
    DescribeLong(&take_ups);
    go_on.WaitForNotification();
    ended = true;
  });
  jobs[kLong].push_back([] { other_began = true; });
  take_ups.Begin(std::move(jobs), absl::ZeroDuration());
  EXPECT_FALSE(take_ups.Stop(absl::Milliseconds(20)));
  EXPECT_TRUE(absl::IsAborted(take_ups.Check("", kLong.first, "long"))) << "its memory may still be written";
  go_on.Notify();
  ASSERT_TRUE(testing::PollUntil([] { return ended.load(); }));
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_FALSE(other_began);
}

TEST(TakeUps, OfNoJobsNobodyWaits) {
  TakeUps take_ups;
  take_ups.Begin({}, absl::InfiniteDuration());
  EXPECT_TRUE(take_ups.CheckAny("").ok());
  EXPECT_TRUE(take_ups.Stop(absl::InfiniteDuration()));
}

}  // namespace
}  // namespace shardd
