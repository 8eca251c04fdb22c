#include "common/schedule/request_orders.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using Kind = OrderEntry::Kind;
using ::testing::HasSubstr;

class RequestOrdersTest : public ::testing::Test {
 protected:
  // Groups 0 (the root), 1 "a" and 2 "b".
  static std::shared_ptr<const ShardPlan> Plan() {
    SpecBuilder builder;
    builder.Param(0, "w", {8});
    builder.Param(builder.AddSharded(0, "a"), "w", {8});
    builder.Param(builder.AddSharded(0, "b"), "w", {8});
    return std::make_shared<const ShardPlan>(builder.Plan());
  }
  void Request(int rank, const std::vector<int>& groups) {
    for (int group : groups) departed_ += orders_.Observe(rank, {Kind::kUnshardForward, group}).has_value() ? 1 : 0;
  }
  // Both ranks step with these, and the step is committed.
  void Step(const std::vector<int>& groups) {
    for (int rank = 0; rank < 2; ++rank) {
      Request(rank, groups);
      orders_.EndStep(rank);
    }
    orders_.StepCommitted();
  }
  std::vector<Departure> CompareFirstStep() {
    std::vector<Departure> departures;
    EXPECT_TRUE(orders_
                    .CompareFirstStep([&](const Departure& departure) {
                      departures.push_back(departure);
                      return absl::OkStatus();
                    })
                    .ok());
    return departures;
  }

  RequestOrders orders_{Plan()};
  int departed_ = 0;
};

TEST_F(RequestOrdersTest, TheFirstCommittedStepBecomesTheCapturedOrder) {
  Step({0, 1, 2});
  EXPECT_EQ(departed_, 0);
  Request(0, {0});
  EXPECT_EQ(orders_.NextUnshard(0, Kind::kUnshardForward), 1);
  Request(0, {1, 2});
  EXPECT_EQ(departed_, 0);
}

TEST_F(RequestOrdersTest, ADepartureNamesBothRequests) {
  Step({0, 1, 2});
  Request(1, {0});
  const std::optional<Departure> departure = orders_.Observe(1, {Kind::kUnshardForward, 2});
  ASSERT_TRUE(departure.has_value());
  EXPECT_EQ(departure->rank, 1);
  EXPECT_EQ(departure->fact, "departs from the recorded order (got Unshard (forward) b, want Unshard (forward) a)");
}

TEST_F(RequestOrdersTest, AStepWithoutRequestsCapturesNothing) {
  Step({});
  Step({0, 2, 1});
  Request(0, {0, 2, 1});
  EXPECT_EQ(departed_, 0);
}

TEST_F(RequestOrdersTest, RanksAreComparedInTheFirstStepAlone) {
  Request(0, {0, 1, 2});
  Request(1, {0, 2, 1});
  orders_.EndStep(0);
  orders_.EndStep(1);
  const std::vector<Departure> departures = CompareFirstStep();
  ASSERT_EQ(departures.size(), 2u);
  EXPECT_EQ(departures[0].rank, 1);
  EXPECT_THAT(departures[0].fact, HasSubstr("rank 0's order in the first step (got group \"b\", want \"a\")"));
  orders_.StepCommitted();
  EXPECT_TRUE(CompareFirstStep().empty());
}

TEST_F(RequestOrdersTest, AStepHasFewEventsOfItsDepartures) {
  Step({0, 1, 2});
  std::vector<std::string> events;
  for (int i = 0; i < 2 * RequestOrders::kEventsPerStep; ++i) {
    const std::optional<Departure> departure = orders_.Observe(0, {Kind::kUnshardBackward, 2});
    ASSERT_TRUE(departure.has_value());
    if (!departure->event.empty()) events.push_back(departure->event);
  }
  ASSERT_EQ(events.size(), static_cast<size_t>(RequestOrders::kEventsPerStep));
  EXPECT_THAT(events.back(), HasSubstr("; more of this step are only counted"));
  orders_.EndEpoch();
  EXPECT_NE(orders_.Observe(0, {Kind::kUnshardBackward, 2})->event, "") << "the next step begins to count anew";
}

TEST_F(RequestOrdersTest, AnAbandonedBackwardMayComeAgain) {
  Step({0, 1, 2});
  Request(0, {0});
  orders_.CloseBackward(0);
  Request(0, {1});
  orders_.AbandonBackward(0);
  Request(0, {1, 2});
  EXPECT_EQ(departed_, 0);
}

TEST_F(RequestOrdersTest, TheCapturedOrderOutlivesTheEpoch) {
  Step({0, 1, 2});
  Request(0, {0, 1});
  orders_.EndEpoch();
  Request(0, {0, 2});
  EXPECT_EQ(departed_, 1);
}

}  // namespace
}  // namespace shardd
