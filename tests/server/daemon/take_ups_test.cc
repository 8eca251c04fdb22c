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

// A job that is taken up by `run`, at once.
TakeUps::TakeUp Once(absl::AnyInvocable<void()> run, uint64_t id = 0) {
  return {id, [run = std::move(run)]() mutable {
            run();
            return TakeUps::Next::kDone;
          }};
}

Jobs Of(const TakeUps::Name& name, absl::AnyInvocable<void()> run) {
  Jobs jobs;
  jobs[name].push_back(Once(std::move(run), kLongId));
  return jobs;
}

void DescribeLong(TakeUps* take_ups) {
  v1::Job job;
  job.set_name(kLong.second);
  job.set_job_id(kLongId);
  job.set_committed_step(7);
  take_ups->Describe(Tenant{kLong.first}, std::move(job), {30, 20});
}

std::string Listed(const TakeUps& take_ups) {
  std::string listed;
  take_ups.List([&](const Tenant& owner, const v1::Job& job, const TakeUps::Claim& claim) {
    absl::StrAppend(&listed, owner.uid, " ", job.name(), " ", job.committed_step(), " ", claim.quota_bytes, " ",
                    claim.planned_bytes, ";");
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
  jobs[kShort].push_back(Once([] {}));
  take_ups.Begin(std::move(jobs), absl::Milliseconds(50));
  ASSERT_TRUE(testing::PollUntil([&] { return take_ups.count() == 1; }));
  EXPECT_TRUE(take_ups.Check("", kShort.first, kShort.second).ok());
  EXPECT_EQ(Listed(take_ups), "1000 long 7 30 20;");
  EXPECT_TRUE(take_ups.CheckClaims("").ok()) << "a new job leaves what this one claims alone, and waits for nobody";
  go_on.Notify();
  EXPECT_TRUE(testing::PollUntil([&] { return take_ups.count() == 0; }));
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
  go_on.Notify();
}

// Ranks ask for their job before they know anything else of the daemon.
TEST(TakeUps, WhoAsksForAnUndescribedJobComesAgain) {
  absl::Notification describe, go_on;
  TakeUps take_ups;
  take_ups.Begin(Of(kLong,
                    [&] {
                      describe.WaitForNotification();
                      DescribeLong(&take_ups);
                      go_on.WaitForNotification();
                    }),
                 absl::ZeroDuration());
  EXPECT_EQ(Listed(take_ups), "");
  EXPECT_TRUE(absl::IsAborted(take_ups.CheckDescribed("list jobs", kLong.first)));
  EXPECT_TRUE(absl::IsAborted(take_ups.CheckDescribed("list jobs", std::nullopt)));
  EXPECT_TRUE(take_ups.CheckDescribed("list jobs", kShort.first).ok());
  EXPECT_TRUE(absl::IsAborted(take_ups.CheckId("", kLongId)));
  EXPECT_TRUE(absl::IsAborted(take_ups.CheckClaims(""))) << "nobody knows what a new job leaves it";
  describe.Notify();
  EXPECT_TRUE(testing::PollUntil([&] { return Listed(take_ups) == "1000 long 7 30 20;"; }));
  EXPECT_TRUE(take_ups.CheckDescribed("list jobs", std::nullopt).ok());
  go_on.Notify();
}

// More than there are threads for.
TEST(TakeUps, ManyThatTakeLongKeepNobodyFromListening) {
  absl::Notification go_on;
  TakeUps take_ups;
  constexpr uint32_t kJobs = 200;
  Jobs jobs;
  for (uint32_t uid = 0; uid < kJobs; ++uid) {
    jobs[{uid, "job"}].push_back({uid, [&, uid, described = false]() mutable {
                                    if (!std::exchange(described, true)) {
                                      v1::Job job;
                                      job.set_name("job");
                                      take_ups.Describe(Tenant{uid}, job, {});
                                      return TakeUps::Next::kTakes;
                                    }
                                    go_on.WaitForNotification();
                                    return TakeUps::Next::kDone;
                                  }});
  }
  const absl::Time start = absl::Now();
  take_ups.Begin(std::move(jobs), absl::Milliseconds(50));
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  EXPECT_TRUE(testing::PollUntil([&] { return take_ups.CheckDescribed("", std::nullopt).ok(); }))
      << "none waits for others to be known";
  EXPECT_EQ(take_ups.count(), kJobs);
  go_on.Notify();
  EXPECT_TRUE(testing::PollUntil([&] { return take_ups.count() == 0; }));
}

TEST(TakeUps, WhatIsShortIsTriedAgainAndSaid) {
  std::atomic<bool> is_short = true;
  std::atomic<int> tries = 0;
  TakeUps take_ups;
  Jobs jobs;
  jobs[kLong].push_back({kLongId, [&]() -> absl::StatusOr<TakeUps::Next> {
                           ++tries;
                           if (is_short) return absl::ResourceExhaustedError("too many open files");
                           return TakeUps::Next::kDone;
                         }});
  take_ups.Begin(std::move(jobs), absl::Milliseconds(50));
  const absl::Status status = take_ups.CheckId("attach", kLongId);
  EXPECT_TRUE(absl::IsAborted(status));
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("too many open files"));
  EXPECT_THAT(take_ups.Warning(), ::testing::HasSubstr("too many open files"));
  EXPECT_TRUE(take_ups.CheckClaims("").ok()) << "for up to 15 minutes it would hold up everybody's new jobs";
  EXPECT_TRUE(testing::PollUntil([&] { return tries >= 2; }));
  is_short = false;
  EXPECT_TRUE(testing::PollUntil([&] { return take_ups.count() == 0; }));
  EXPECT_EQ(take_ups.Warning(), "");
}

TEST(TakeUps, StopDoesNotWaitForWhatIsShort) {
  TakeUps take_ups;
  Jobs jobs;
  jobs[kLong].push_back(
      {kLongId, []() -> absl::StatusOr<TakeUps::Next> { return absl::ResourceExhaustedError("too many open files"); }});
  take_ups.Begin(std::move(jobs), absl::ZeroDuration());
  EXPECT_TRUE(take_ups.Stop(testing::kLimit));
  EXPECT_TRUE(absl::IsAborted(take_ups.CheckId("", kLongId))) << "it is the next daemon's";
}

TEST(TakeUps, BeginReturnsWhenAllAreTakenUp) {
  std::atomic<int> taken = 0;
  TakeUps take_ups;
  Jobs jobs;
  for (uint32_t uid = 0; uid < 100; ++uid) jobs[{uid, "job"}].push_back(Once([&] { ++taken; }));
  take_ups.Begin(std::move(jobs), absl::Minutes(1));
  EXPECT_EQ(taken, 100);
  EXPECT_EQ(take_ups.count(), 0u);
}

TEST(TakeUps, JobsOfANameAreOneAfterTheOther) {
  std::string order;  // of one thread at a time
  TakeUps take_ups;
  Jobs jobs = Of(kLong, [&] { order += "earlier "; });
  jobs[kLong].push_back(Once([&] { order += "later"; }));
  take_ups.Begin(std::move(jobs), absl::Minutes(1));
  EXPECT_EQ(order, "earlier later");
}

TEST(TakeUps, StopBeginsNoOtherAndSaysWhatIsLeft) {
  static absl::Notification began, go_on;  // a thread that is left has these
  static TakeUps& take_ups = *new TakeUps;
  static std::atomic<bool> other_began = false, ended = false;
  Jobs jobs = Of(kLong, [] {
    DescribeLong(&take_ups);
    began.Notify();
    go_on.WaitForNotification();
    ended = true;
  });
  jobs[kLong].push_back(Once([] { other_began = true; }));
  take_ups.Begin(std::move(jobs), absl::ZeroDuration());
  began.WaitForNotification();
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
  EXPECT_TRUE(take_ups.CheckClaims("").ok());
  EXPECT_TRUE(take_ups.Stop(absl::InfiniteDuration()));
}

}  // namespace
}  // namespace shardd
