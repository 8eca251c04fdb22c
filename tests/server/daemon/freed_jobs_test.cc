#include "server/daemon/freed_jobs.h"

#include <string>

#include "gtest/gtest.h"

namespace shardd {
namespace {

v1::LostJob Lost(int64_t step) {
  v1::LostJob lost;
  lost.set_committed_step(step);
  return lost;
}

const absl::Time kNow = absl::UnixEpoch() + absl::Hours(1);

TEST(FreedJobsTest, TellsTheOwnerTheNewestOfAName) {
  FreedJobs jobs;
  jobs.Add("a", {7}, Lost(1), kNow);
  jobs.Add("a", {7}, Lost(2), kNow);
  ASSERT_NE(jobs.Find("a", {7}), nullptr);
  EXPECT_EQ(jobs.Find("a", {7})->committed_step(), 2);
  EXPECT_EQ(jobs.Find("a", {8}), nullptr) << "another user's";
  jobs.Forget("a", 8);
  EXPECT_NE(jobs.Find("a", {7}), nullptr) << "another user's of that name";
  jobs.Forget("a", 7);
  EXPECT_EQ(jobs.Find("a", {7}), nullptr);
}

TEST(FreedJobsTest, TellsNobodyWithoutTheSecret) {
  FreedJobs jobs;
  jobs.Add("a", {7, SecretDigest{1}}, Lost(1), kNow);
  EXPECT_EQ(jobs.Find("a", {7}), nullptr);
  EXPECT_EQ(jobs.Find("a", {7, SecretDigest{2}}), nullptr);
  EXPECT_NE(jobs.Find("a", {7, SecretDigest{1}}), nullptr);
}

TEST(FreedJobsTest, ForgetsTheOldestOfMany) {
  FreedJobs jobs;
  for (int i = 0; i < 300; ++i) jobs.Add("job" + std::to_string(i), {7}, Lost(i), kNow);
  EXPECT_EQ(jobs.Find("job0", {7}), nullptr);
  EXPECT_NE(jobs.Find("job299", {7}), nullptr);
}

TEST(FreedJobsTest, AUserOfManyTakesNoOthersPlace) {
  FreedJobs jobs;
  jobs.Add("llm", {8}, Lost(5), kNow);
  jobs.Replace(5000, 5001, 8);
  for (int i = 0; i < 600; ++i) jobs.Add("job" + std::to_string(i), {7}, Lost(i), kNow);
  for (uint64_t id = 1; id <= 600; ++id) jobs.Replace(id, 1000 + id, 7);
  EXPECT_NE(jobs.Find("llm", {8}), nullptr);
  EXPECT_TRUE(jobs.replaced(5000));
  EXPECT_NE(jobs.Find("job599", {7}), nullptr);
  EXPECT_TRUE(jobs.replaced(600));
}

TEST(FreedJobsTest, KnowsTheNewestThatAreReplaced) {
  FreedJobs jobs;
  EXPECT_FALSE(jobs.replaced(1));
  for (uint64_t id = 1; id <= 300; ++id) jobs.Replace(id, 1000 + id, 7);
  EXPECT_FALSE(jobs.replaced(1));
  EXPECT_TRUE(jobs.replaced(300));
  EXPECT_TRUE(jobs.replaced(45));
  EXPECT_FALSE(jobs.replaced(301));
}

TEST(FreedJobsTest, KnowsWhatGoesOnInTheirPlaces) {
  FreedJobs jobs;
  EXPECT_EQ(jobs.Newest(1), 1);
  jobs.Replace(1, 4, 7);
  jobs.Replace(2, 5, 7);
  jobs.Replace(4, 7, 7);
  EXPECT_EQ(jobs.Newest(1), 7);
  EXPECT_EQ(jobs.Newest(2), 5);
  EXPECT_EQ(jobs.Newest(7), 7);
}

TEST(FreedJobsTest, RanksAreAwaitedForAQuarterOfAnHour) {
  FreedJobs jobs;
  EXPECT_FALSE(jobs.Awaits(kNow));
  jobs.Add("a", {7}, Lost(1), kNow);
  EXPECT_TRUE(jobs.Awaits(kNow + absl::Minutes(14)));
  EXPECT_FALSE(jobs.Awaits(kNow + absl::Minutes(16)));
}

}  // namespace
}  // namespace shardd
