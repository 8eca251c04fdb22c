#include "common/schedule/prefetch_order.h"

#include <gtest/gtest.h>

namespace shardd {
namespace {

using Kind = OrderEntry::Kind;

std::vector<OrderEntry> ThreeGroups() {
  return {{Kind::kUnshardForward, 0},  {Kind::kUnshardForward, 1},  {Kind::kUnshardForward, 2},
          {Kind::kUnshardBackward, 2}, {Kind::kSubmitGradients, 2}, {Kind::kUnshardBackward, 1},
          {Kind::kSubmitGradients, 1}, {Kind::kSubmitGradients, 0}};
}

TEST(OrderTrackerTest, RecordsWithoutJudgingWhileNothingIsCaptured) {
  OrderTracker tracker;
  tracker.BeginStep(nullptr);
  for (const OrderEntry& entry : ThreeGroups()) {
    EXPECT_FALSE(tracker.Observe(entry).departed);
  }
  EXPECT_EQ(tracker.sequence(), ThreeGroups());
  EXPECT_FALSE(tracker.NextUnshard(Kind::kUnshardForward).has_value());
}

TEST(OrderTrackerTest, SwappedGroupsDepartTwiceAndNameWhatWasExpected) {
  const CapturedOrder captured(ThreeGroups());
  OrderTracker tracker;
  tracker.BeginStep(&captured);
  EXPECT_FALSE(tracker.Observe({Kind::kUnshardForward, 0}).departed);
  const OrderTracker::Observation first = tracker.Observe({Kind::kUnshardForward, 2});
  EXPECT_TRUE(first.departed);
  EXPECT_EQ(first.expected->group, 1);
  EXPECT_TRUE(tracker.Observe({Kind::kUnshardForward, 1}).departed);
  EXPECT_FALSE(tracker.Observe({Kind::kUnshardBackward, 2}).departed) << "positions after the swap fit again";
}

TEST(OrderTrackerTest, MoreRequestsThanRecordedDepart) {
  const CapturedOrder captured(std::vector<OrderEntry>{{Kind::kUnshardForward, 0}});
  OrderTracker tracker;
  tracker.BeginStep(&captured);
  EXPECT_FALSE(tracker.Observe({Kind::kUnshardForward, 0}).departed);
  const OrderTracker::Observation extra = tracker.Observe({Kind::kUnshardForward, 1});
  EXPECT_TRUE(extra.departed);
  EXPECT_FALSE(extra.expected.has_value());
}

TEST(OrderTrackerTest, AGroupLeftOutIsOneDeparture) {
  const CapturedOrder captured(ThreeGroups());
  OrderTracker tracker;
  tracker.BeginStep(&captured);
  int departures = 0;
  for (size_t i = 0; i < captured.size(); ++i) {
    if (i != 1) {
      departures += tracker.Observe(captured[i]).departed ? 1 : 0;
    }
  }
  EXPECT_EQ(departures, 1);
}

TEST(OrderTrackerTest, AnEvaluationBetweenStepsDepartsFromNothing) {
  const CapturedOrder captured(ThreeGroups());
  OrderTracker tracker;
  tracker.BeginStep(&captured);
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(tracker.Observe(captured[i]).departed);  // a forward without a backward
  }
  for (const OrderEntry& entry : ThreeGroups()) {
    EXPECT_FALSE(tracker.Observe(entry).departed);
  }
}

TEST(OrderTrackerTest, NextUnshardSkipsSubmissionsAndStopsAtTheOtherPhase) {
  const CapturedOrder captured(ThreeGroups());
  OrderTracker tracker;
  tracker.BeginStep(&captured);
  tracker.Observe(captured[0]);
  EXPECT_EQ(tracker.NextUnshard(Kind::kUnshardForward), 1);
  tracker.Observe(captured[1]);
  tracker.Observe(captured[2]);
  EXPECT_FALSE(tracker.NextUnshard(Kind::kUnshardForward).has_value()) << "backward comes next";
  EXPECT_EQ(tracker.NextUnshard(Kind::kUnshardBackward), 2);
  tracker.Observe(captured[3]);
  EXPECT_EQ(tracker.NextUnshard(Kind::kUnshardBackward), 1) << "the submission between them is no unshard";
}

TEST(OrderTrackerTest, NothingIsPrefetchedAfterADeparture) {
  const CapturedOrder captured(ThreeGroups());
  OrderTracker tracker;
  tracker.BeginStep(&captured);
  tracker.Observe({Kind::kUnshardForward, 2});
  EXPECT_FALSE(tracker.NextUnshard(Kind::kUnshardForward).has_value());
}

TEST(OrderTrackerTest, AGroupUsedTwiceIsExpectedTwice) {
  const CapturedOrder captured(
      std::vector<OrderEntry>{{Kind::kUnshardForward, 0}, {Kind::kUnshardForward, 1}, {Kind::kUnshardForward, 0}});
  OrderTracker tracker;
  tracker.BeginStep(&captured);
  tracker.Observe(captured[0]);
  tracker.Observe(captured[1]);
  EXPECT_EQ(tracker.NextUnshard(Kind::kUnshardForward), 0);
  EXPECT_FALSE(tracker.Observe(captured[2]).departed);
}

TEST(OrderTrackerTest, CaptureMayArriveInTheMiddleOfAStep) {
  OrderTracker tracker;
  tracker.BeginStep(nullptr);
  tracker.Observe({Kind::kUnshardForward, 0});
  const CapturedOrder captured(ThreeGroups());
  tracker.SetCaptured(&captured);
  EXPECT_EQ(tracker.NextUnshard(Kind::kUnshardForward), 1);
}

}  // namespace
}  // namespace shardd
