#include "common/schedule/unshard_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(UnshardPoolTest, RanksShareTheSlotOfAGroup) {
  UnshardPool pool(/*slots=*/4, /*quota=*/2, /*ranks=*/2, /*groups=*/3);
  const UnshardPool::Use first = *pool.Acquire(0, 1);
  EXPECT_TRUE(first.fill);
  const UnshardPool::Use second = *pool.Acquire(1, 1);
  EXPECT_FALSE(second.fill) << "one copy per node";
  EXPECT_EQ(first.slot, second.slot);
  EXPECT_THAT(pool.Filled(first.slot), ElementsAre(0, 1));
  EXPECT_TRUE(pool.Acquire(0, 1)->ready);
}

TEST(UnshardPoolTest, TheQuotaLimitsWhatARankHolds) {
  UnshardPool pool(3, 2, 1, 3);
  ASSERT_TRUE(pool.Acquire(0, 0).ok());
  ASSERT_TRUE(pool.Acquire(0, 1).ok());
  const absl::Status third = pool.Acquire(0, 2).status();
  EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(third.message()), ::testing::HasSubstr("reshard one first"));
  pool.Release(0, 0);
  EXPECT_TRUE(pool.Acquire(0, 2).ok());
}

TEST(UnshardPoolTest, RanksWaitForTheFillsOfSlotsTheyGaveBack) {
  UnshardPool pool(/*slots=*/2, /*quota=*/2, /*ranks=*/1, /*groups=*/3);
  const int first = pool.Acquire(0, 0)->slot;
  pool.Release(0, 0);
  const int second = pool.Acquire(0, 1)->slot;
  pool.Release(0, 1);
  for (int again = 0; again < 2; ++again) {
    const absl::StatusOr<UnshardPool::Use> use = pool.Acquire(0, 2);
    ASSERT_TRUE(use.ok()) << use.status();
    EXPECT_EQ(use->slot, -1);
    EXPECT_FALSE(use->fill);
    EXPECT_EQ(pool.held(0), 0) << "it has nothing yet";
    EXPECT_EQ(pool.slot_of(2), -1);
  }
  EXPECT_THAT(pool.Filled(second), IsEmpty());
  const absl::StatusOr<UnshardPool::Use> use = pool.Acquire(0, 2);
  ASSERT_TRUE(use.ok()) << use.status();
  EXPECT_EQ(use->slot, second);
  EXPECT_TRUE(use->fill);
  EXPECT_EQ(pool.slot_of(0), first) << "what is being filled stays";
}

TEST(UnshardPoolTest, AnUntouchedPrefetchGivesWayToARequest) {
  UnshardPool pool(2, 2, 1, 3);
  ASSERT_TRUE(pool.Acquire(0, 0).ok());
  const UnshardPool::Use ahead = pool.Prefetch(0, 1);
  ASSERT_GE(ahead.slot, 0);
  pool.Filled(ahead.slot);
  const UnshardPool::Use use = *pool.Acquire(0, 2);
  EXPECT_TRUE(use.fill);
  EXPECT_EQ(use.slot, ahead.slot);
}

TEST(UnshardPoolTest, APrefetchNeverTakesMoreThanTheQuota) {
  UnshardPool pool(4, 1, 2, 4);
  ASSERT_TRUE(pool.Acquire(0, 0).ok());
  EXPECT_EQ(pool.Prefetch(0, 1).slot, -1);
  EXPECT_GE(pool.Prefetch(1, 1).slot, 0) << "quotas are per rank";
}

TEST(UnshardPoolTest, APrefetchThatIsUsedIsAHit) {
  UnshardPool pool(2, 2, 1, 2);
  const UnshardPool::Use ahead = pool.Prefetch(0, 1);
  ASSERT_TRUE(ahead.fill);
  EXPECT_THAT(pool.Filled(ahead.slot), IsEmpty()) << "nobody waits for it yet";
  const UnshardPool::Use use = *pool.Acquire(0, 1);
  EXPECT_TRUE(use.prefetched);
  EXPECT_TRUE(use.ready);
  EXPECT_FALSE(use.fill);
  EXPECT_EQ(pool.held(0), 1);
}

TEST(UnshardPoolTest, ASlotKeepsItsGroupUntilItIsNeeded) {
  UnshardPool pool(2, 1, 1, 3);
  const int slot = pool.Acquire(0, 0)->slot;
  pool.Filled(slot);
  pool.Release(0, 0);
  const UnshardPool::Use again = *pool.Acquire(0, 0);
  EXPECT_FALSE(again.fill);
  EXPECT_TRUE(again.ready);
}

TEST(UnshardPoolTest, ASlotBeingFilledIsKeptEvenAfterInvalidate) {
  UnshardPool pool(1, 1, 1, 2);
  const int slot = pool.Acquire(0, 0)->slot;
  pool.Invalidate();
  EXPECT_EQ(pool.Acquire(0, 1)->slot, -1) << "device work still writes into the only slot";
  EXPECT_THAT(pool.Filled(slot), IsEmpty()) << "its bytes are of an old version";
  const UnshardPool::Use use = *pool.Acquire(0, 1);
  EXPECT_TRUE(use.fill);
}

TEST(UnshardPoolTest, InvalidateMakesEveryGroupBeFilledAgain) {
  UnshardPool pool(2, 2, 1, 2);
  pool.Filled(pool.Acquire(0, 0)->slot);
  pool.Release(0, 0);
  pool.Invalidate();
  EXPECT_TRUE(pool.Acquire(0, 0)->fill);
  EXPECT_EQ(pool.held(0), 1);
}

// With as many slots as all quotas together (or as there are groups), a rank within its quota always gets one.
TEST(UnshardPoolTest, ARankWithinItsQuotaNeverWaitsForAnotherRank) {
  for (int seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const int ranks = 1 + static_cast<int>(random() % 4);
    const int groups = 1 + static_cast<int>(random() % 8);
    const int quota = 1 + static_cast<int>(random() % groups);
    UnshardPool pool(std::min(groups, ranks * quota), quota, ranks, groups);
    std::vector<std::set<int>> held(ranks);
    for (int i = 0; i < 400; ++i) {
      const int rank = static_cast<int>(random() % ranks);
      const int group = static_cast<int>(random() % groups);
      if (held[rank].count(group) != 0) {
        pool.Release(rank, group);
        held[rank].erase(group);
      } else if (static_cast<int>(held[rank].size()) < quota) {
        absl::StatusOr<UnshardPool::Use> use = pool.Acquire(rank, group);
        ASSERT_TRUE(use.ok()) << use.status();
        held[rank].insert(group);
        if (use->fill) {
          pool.Filled(use->slot);
        }
        if (const UnshardPool::Use ahead = pool.Prefetch(rank, static_cast<int>(random() % groups)); ahead.fill) {
          pool.Filled(ahead.slot);
        }
      }
    }
  }
}

}  // namespace
}  // namespace shardd
