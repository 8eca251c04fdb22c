#include "common/schedule/pooled_unshards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

class PooledUnshardsTest : public ::testing::Test {
 protected:
  static constexpr int kGroups = 16;  // more than the pool has slots
  static std::shared_ptr<const ShardPlan> Plan(v1::UnshardMode mode) {
    SpecBuilder builder;
    builder.config().set_unshard_mode(mode);
    builder.Param(0, "w", {8});
    for (int g = 1; g < kGroups; ++g) builder.Param(builder.AddSharded(0, absl::StrCat("g", g)), "w", {8});
    return std::make_shared<const ShardPlan>(builder.Plan());
  }
  PooledUnshards::Grant Grant(int rank) {
    const auto grant = unshards_.GrantNext(rank);
    EXPECT_TRUE(grant.ok()) << grant.status();
    EXPECT_TRUE(grant.ok() && grant->has_value());
    return grant.ok() && grant->has_value() ? **grant : PooledUnshards::Grant();
  }
  bool GrantsNothing(int rank) {
    const auto grant = unshards_.GrantNext(rank);
    return grant.ok() && !grant->has_value();
  }
  // Asks and is granted.
  PooledUnshards::Grant Unshard(int rank, int group) {
    unshards_.Ask(rank, group);
    return Grant(rank);
  }
  static std::vector<std::pair<int, uint64_t>> Served(const std::vector<PooledUnshards::There>& there) {
    std::vector<std::pair<int, uint64_t>> served;
    for (const PooledUnshards::There& unshard : there) served.emplace_back(unshard.rank, unshard.asked);
    return served;
  }

  PooledUnshards unshards_{Plan(v1::UNSHARD_MODE_POOLED)};
};

TEST_F(PooledUnshardsTest, OneFillServesAllRanksThatAsk) {
  const PooledUnshards::Grant first = Unshard(0, 1);
  const PooledUnshards::Grant second = Unshard(1, 1);
  ASSERT_TRUE(first.fill.has_value());
  EXPECT_FALSE(second.fill.has_value());
  EXPECT_EQ(first.offset_bytes, second.offset_bytes);
  EXPECT_EQ(unshards_.pending_fills(), 1);
  EXPECT_TRUE(unshards_.AwaitsFill(1));
  EXPECT_THAT(Served(unshards_.Filled(*first.fill)), ElementsAre(Pair(0, 1u), Pair(1, 1u)));
  EXPECT_EQ(unshards_.pending_fills(), 0);
  EXPECT_TRUE(Unshard(0, 1).there);
}

TEST_F(PooledUnshardsTest, RequestsAreCountedNotGrants) {
  unshards_.Ask(0, 1);
  unshards_.Ask(0, 1);
  const PooledUnshards::Grant grant = Grant(0);
  EXPECT_EQ(grant.asked, 2u);
  EXPECT_TRUE(GrantsNothing(0)) << "one grant serves both";
  EXPECT_THAT(Served(unshards_.Filled(*grant.fill)), ElementsAre(Pair(0, 2u)));
}

TEST_F(PooledUnshardsTest, TheNextFillOfASlotWaitsForItsReaders) {
  const PooledUnshards::Grant first = Unshard(0, 1);
  EXPECT_THAT(unshards_.ReadersBefore(*first.fill), IsEmpty());
  unshards_.Filled(*first.fill);
  unshards_.Reshard(0, 1, /*done=*/7);
  EXPECT_THAT(unshards_.ReadersBefore(*first.fill), ElementsAre(Pair(0, 7u)));
  unshards_.EndSession(0);
  EXPECT_THAT(unshards_.ReadersBefore(*first.fill), IsEmpty()) << "its next session has other signals";
}

TEST_F(PooledUnshardsTest, AStreamThatReshardsBeforeTheFillIsServed) {
  const PooledUnshards::Grant grant = Unshard(0, 1);
  unshards_.Reshard(0, 1, /*done=*/3);
  EXPECT_THAT(Served(unshards_.Filled(*grant.fill)), ElementsAre(Pair(0, 1u)));
}

TEST_F(PooledUnshardsTest, AHostThatReshardsBeforeTheFillIsNotServed) {
  const PooledUnshards::Grant grant = Unshard(0, 1);
  unshards_.Reshard(0, 1, /*done=*/0);
  EXPECT_THAT(unshards_.Filled(*grant.fill), IsEmpty());
}

TEST_F(PooledUnshardsTest, AFillOfAnOlderVersionServesNobody) {
  const PooledUnshards::Grant grant = Unshard(0, 1);
  unshards_.NewVersion();
  EXPECT_THAT(unshards_.Filled(*grant.fill), IsEmpty());
  EXPECT_EQ(unshards_.pending_fills(), 0);
}

TEST_F(PooledUnshardsTest, AFillOfAnEndedEpochServesNobody) {
  const PooledUnshards::Grant old = Unshard(0, 1);
  unshards_.EndEpoch();
  EXPECT_EQ(unshards_.pending_fills(), 0);
  EXPECT_FALSE(unshards_.IsOfEpoch(*old.fill));
  const PooledUnshards::Grant anew = Unshard(0, 1);
  ASSERT_TRUE(anew.fill.has_value());
  EXPECT_NE(anew.fill->slot, old.fill->slot) << "that one is still being written";
  EXPECT_THAT(unshards_.Filled(*old.fill), IsEmpty());
  EXPECT_EQ(unshards_.pending_fills(), 1);
}

TEST_F(PooledUnshardsTest, ARequestWaitsWhileEachFreeSlotIsFilling) {
  std::vector<PoolFill> fills;
  for (int group = 1; group < kGroups; ++group) {
    unshards_.Ask(0, group);
    const auto grant = unshards_.GrantNext(0);
    ASSERT_TRUE(grant.ok()) << grant.status();
    if (!grant->has_value()) break;
    fills.push_back(*(*grant)->fill);
    unshards_.Reshard(0, group, /*done=*/0);
  }
  ASSERT_LT(fills.size(), static_cast<size_t>(kGroups - 1)) << "the pool has a slot for each group";
  EXPECT_TRUE(unshards_.Waits(0));
  unshards_.Filled(fills.front());
  EXPECT_EQ(Grant(0).fill->slot, fills.front().slot);
  EXPECT_FALSE(unshards_.Waits(0));
}

TEST_F(PooledUnshardsTest, APrefetchMakesTheRequestAHit) {
  const PooledUnshards::Prefetched prefetched = unshards_.Prefetch(0, 1);
  EXPECT_TRUE(prefetched.granted);
  ASSERT_TRUE(prefetched.fill.has_value());
  EXPECT_FALSE(unshards_.Prefetch(0, 1).granted) << "it is there already";
  const PooledUnshards::Grant grant = Unshard(0, 1);
  EXPECT_TRUE(grant.prefetched);
  EXPECT_FALSE(grant.fill.has_value());
}

TEST_F(PooledUnshardsTest, ARankThatGivesUpWaitsForNothing) {
  const PooledUnshards::Grant grant = Unshard(0, 1);
  unshards_.Ask(0, 2);
  unshards_.GiveUp(0, /*done=*/0);
  EXPECT_FALSE(unshards_.Waits(0));
  EXPECT_FALSE(unshards_.AwaitsFill(0));
  EXPECT_THAT(unshards_.Filled(*grant.fill), IsEmpty());
}

TEST_F(PooledUnshardsTest, AStreamThatGivesUpStillReadsItsSlots) {
  const PooledUnshards::Grant grant = Unshard(0, 1);
  unshards_.GiveUp(0, /*done=*/9);
  EXPECT_THAT(unshards_.ReadersBefore(*grant.fill), ElementsAre(Pair(0, 9u)));
  EXPECT_THAT(Served(unshards_.Filled(*grant.fill)), ElementsAre(Pair(0, 1u)));
}

TEST_F(PooledUnshardsTest, WithoutAPoolNothingIsEverPending) {
  PooledUnshards unshards(Plan(v1::UNSHARD_MODE_ZERO_COPY));
  EXPECT_FALSE(unshards.pooled());
  unshards.Reshard(0, 1, 3);
  unshards.GiveUp(0, 3);
  unshards.Leave(0);
  unshards.EndSession(0);
  unshards.EndEpoch();
  EXPECT_EQ(unshards.pending_fills(), 0);
}

}  // namespace
}  // namespace shardd
