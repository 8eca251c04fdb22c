#include "server/daemon/early_refusals.h"

#include <string>

#include "gtest/gtest.h"

namespace shardd {
namespace {

const absl::Time kNow = absl::UnixEpoch() + absl::Hours(1);

EarlyRefusals::Refusal Final(int rank) { return {rank, absl::FailedPreconditionError("other nodes"), 7}; }

TEST(EarlyRefusalsTest, GoOnceToTheJobOfTheirNameAndUser) {
  EarlyRefusals refusals;
  refusals.Add("a", {7}, Final(1), kNow);
  refusals.Add("a", {7}, Final(1), kNow);
  refusals.Add("a", {7}, Final(2), kNow);
  refusals.Add("b", {7}, Final(3), kNow);
  EXPECT_TRUE(refusals.Take("a", {8}, kNow).empty()) << "another user's";
  const auto taken = refusals.Take("a", {7}, kNow);
  ASSERT_EQ(taken.size(), 2u);
  EXPECT_EQ(taken[0].rank, 1);
  EXPECT_EQ(taken[1].rank, 2);
  EXPECT_EQ(taken[0].ticks, 7u);
  EXPECT_TRUE(refusals.Take("a", {7}, kNow).empty());
}

TEST(EarlyRefusalsTest, WhatMayComeAgainIsNone) {
  EarlyRefusals refusals;
  refusals.Add("a", {7}, {1, absl::UnavailableError("later"), 7}, kNow);
  refusals.Add("a", {7}, {1, absl::OkStatus(), 7}, kNow);
  refusals.Add("a", {7}, Final(-1), kNow);
  EXPECT_TRUE(refusals.Take("a", {7}, kNow).empty());
}

TEST(EarlyRefusalsTest, AreOfOneAttempt) {
  EarlyRefusals refusals;
  refusals.Add("a", {7}, Final(1), kNow);
  EXPECT_EQ(refusals.Take("a", {7}, kNow + absl::Seconds(29)).size(), 1u);
  refusals.Add("a", {7}, Final(1), kNow);
  EXPECT_TRUE(refusals.Take("a", {7}, kNow + absl::Seconds(30)).empty());
}

TEST(EarlyRefusalsTest, RefusalsWithoutAJobsSecretDoNotReachIt) {
  const Tenant owner{7, SecretDigest{1}};
  EarlyRefusals refusals;
  refusals.Add("a", {7}, Final(1), kNow);
  refusals.Add("a", {7, SecretDigest{2}}, Final(2), kNow);
  refusals.Add("a", owner, Final(3), kNow);
  const auto taken = refusals.Take("a", owner, kNow);
  ASSERT_EQ(taken.size(), 1u);
  EXPECT_EQ(taken[0].rank, 3);
  EXPECT_EQ(refusals.Take("a", {7}, kNow).size(), 2u) << "a job without a secret hears all of its user's";
}

TEST(EarlyRefusalsTest, AUserWhoHasManyTakesNoOthersPlace) {
  EarlyRefusals refusals;
  refusals.Add("victim", {8}, Final(1), kNow);
  for (int i = 0; i < 1000; ++i) refusals.Add("job" + std::to_string(i), {7}, Final(1), kNow);
  EXPECT_EQ(refusals.Take("victim", {8}, kNow).size(), 1u);
  EXPECT_TRUE(refusals.Take("job0", {7}, kNow).empty());
  EXPECT_EQ(refusals.Take("job999", {7}, kNow).size(), 1u);
}

}  // namespace
}  // namespace shardd
