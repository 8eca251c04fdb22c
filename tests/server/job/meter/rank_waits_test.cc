#include "server/job/meter/rank_waits.h"

#include <gtest/gtest.h>

#include <map>
#include <utility>

namespace shardd {
namespace {

constexpr auto kMs = [](int64_t ms) { return absl::UnixEpoch() + absl::Milliseconds(ms); };

std::map<std::pair<int, int>, int64_t> WaitsInMs(const RankWaits& waits) {
  v1::JobMetrics described;
  waits.Describe(&described);
  std::map<std::pair<int, int>, int64_t> result;
  for (const v1::RankWait& wait : described.waits()) {
    result[{wait.rank(), wait.awaited()}] = wait.wait_ns() / 1'000'000;
  }
  return result;
}
using Waits = std::map<std::pair<int, int>, int64_t>;

TEST(RankWaitsTest, WhoComesLastWasAwaitedByAllOthers) {
  RankWaits waits(3);
  waits.Arrive(0, kMs(0));
  waits.Arrive(1, kMs(30));
  EXPECT_EQ(waits.in_step(), absl::ZeroDuration());
  waits.Arrive(2, kMs(100));
  EXPECT_EQ(WaitsInMs(waits), (Waits{{{0, 2}, 100}, {{1, 2}, 70}}));
  EXPECT_EQ(waits.in_step(), absl::Milliseconds(170));
  EXPECT_EQ(waits.for_one_in_step(), absl::Milliseconds(70)) << "until then another had not come either";
  EXPECT_EQ(waits.most_awaited_in_step(), 2);
  EXPECT_EQ(waits.awaited_in_step(2), absl::Milliseconds(170));
}

TEST(RankWaitsTest, AStepBeginsWithNoWaitsOfTheOneBefore) {
  RankWaits waits(2);
  waits.Arrive(1, kMs(0));
  waits.Arrive(0, kMs(5));
  waits.BeginStep();
  EXPECT_EQ(waits.in_step() + waits.for_one_in_step() + waits.asleep_in_step(), absl::ZeroDuration());
  EXPECT_EQ(waits.most_awaited_in_step(), -1);
  waits.Arrive(0, kMs(10));
  waits.Arrive(1, kMs(12));
  EXPECT_EQ(WaitsInMs(waits), (Waits{{{1, 0}, 5}, {{0, 1}, 2}}));
}

TEST(RankWaitsTest, ALeadingRankWaitsAgainWhenOthersHaveCome) {
  RankWaits waits(2);
  waits.Arrive(0, kMs(0));
  waits.Arrive(0, kMs(1));
  waits.Arrive(1, kMs(10));
  EXPECT_EQ(WaitsInMs(waits), (Waits{{{0, 1}, 10}}));
  waits.Arrive(1, kMs(14));
  EXPECT_EQ(WaitsInMs(waits), (Waits{{{0, 1}, 14}}));
}

TEST(RankWaitsTest, ASleeperWaitsForWhoseCommandReleasesItsSlot) {
  RankWaits waits(3);
  waits.Sleep(1, kMs(0));
  EXPECT_TRUE(waits.any_sleeps());
  waits.Wake(/*by=*/0, kMs(10), [](int) { return true; });
  EXPECT_TRUE(WaitsInMs(waits).empty());
  waits.Wake(/*by=*/2, kMs(25), [](int) { return false; });
  EXPECT_FALSE(waits.any_sleeps());
  EXPECT_EQ(WaitsInMs(waits), (Waits{{{1, 2}, 25}}));
  EXPECT_EQ(waits.asleep_in_step(), absl::Milliseconds(25));
  EXPECT_EQ(waits.for_one_in_step(), absl::ZeroDuration()) << "rank 0 did not wait";
}

TEST(RankWaitsTest, ASleeperThatGoesOnByItselfWaitedForNobody) {
  RankWaits waits(2);
  waits.Sleep(0, kMs(0));
  waits.GoOn(0, kMs(50));
  waits.Arrive(0, kMs(60));
  waits.Arrive(1, kMs(70));
  EXPECT_EQ(WaitsInMs(waits), (Waits{{{0, 1}, 10}}));
  EXPECT_EQ(waits.for_one_in_step(), absl::Milliseconds(10));
}

TEST(RankWaitsTest, WaitsOfAnEndedEpochCountForNobody) {
  RankWaits waits(2);
  waits.Arrive(0, kMs(0));
  waits.Arrive(0, kMs(0));
  waits.Drop();
  waits.Arrive(1, kMs(100));
  waits.Arrive(0, kMs(101));
  EXPECT_EQ(WaitsInMs(waits), (Waits{{{1, 0}, 1}}));
}

TEST(RankWaitsTest, OneRankWaitsForNobody) {
  RankWaits waits(1);
  waits.Sleep(0, kMs(0));
  waits.Arrive(0, kMs(5));
  EXPECT_TRUE(WaitsInMs(waits).empty());
  EXPECT_EQ(waits.for_one_in_step(), absl::ZeroDuration());
}

TEST(RankWaitsTest, ManyRanksAreNotToldApartByPairs) {
  const int ranks = RankWaits::kMostAwaited + 2;
  RankWaits waits(ranks);
  for (int last : {3, ranks - 2, ranks - 1}) {
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank != last) waits.Arrive(rank, kMs(0));
    }
    waits.Arrive(last, kMs(1));
  }
  EXPECT_EQ(WaitsInMs(waits), (Waits{{{-1, 3}, ranks - 1}, {{-1, -1}, 2 * (ranks - 1)}}));
}

}  // namespace
}  // namespace shardd
