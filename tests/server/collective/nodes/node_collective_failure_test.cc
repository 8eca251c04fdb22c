// What ends sums over nodes before they are there, and that nothing of it stays.

#include "tests/server/collective/nodes/node_collective_fixture.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

class NodeCollectiveFailureTest : public NodeCollectiveTest {
 protected:
  void SetUp() override {
    SpecBuilder builder(2);
    builder.config().set_strategy(v1::STRATEGY_HYBRID_SHARD);
    const int a = builder.AddSharded(0, "a");
    builder.Param(a, "w", {33, 5});
    builder.Param(a, "v", {9});
    Start(builder, 2);
    given_ = Everything(Group("a"));
  }
  // On one node alone.
  Pending* SubmitTo(size_t node, const std::function<void(ReduceScatterRequest&)>& change = nullptr) {
    auto pending = std::make_shared<Pending>();
    ReduceScatterRequest request = Request(node, given_, *pending);
    if (change != nullptr) change(request);
    return Submit(node, std::move(request), pending);
  }
  void ExpectAll(const std::vector<Pending*>& all, absl::StatusCode code) {
    for (Pending* pending : all) EXPECT_EQ(Await(pending).code(), code) << pending->status;
  }
  // The next generation is as the first one.
  void ExpectThatTheNextGenerationWorks() {
    Begin();
    std::vector<Given> sums;
    for (int i = 0; i < 2 * kNodeSlots; ++i) {
      sums.push_back(Everything(Group("a"), i == 0 ? GradientMode::kOverwrite : GradientMode::kAccumulate, i));
      Refer(sums.back());
    }
    std::vector<Pending*> all;
    for (const Given& given : sums) {
      for (Pending* pending : NodeCollectiveTest::Submit(given)) all.push_back(pending);
    }
    ExpectAll(all, absl::StatusCode::kOk);
    ExpectAsReferred(sums);
  }
  std::vector<Pending*> SubmitSome(int count) {
    std::vector<Pending*> all;
    for (int i = 0; i < count; ++i) {
      for (Pending* pending : NodeCollectiveTest::Submit(given_)) all.push_back(pending);
    }
    return all;
  }
  using NodeCollectiveTest::Submit;

  Given given_;
};

TEST_P(NodeCollectiveFailureTest, BeginEndsWhatWaitsAndWhatIsExchanged) {
  switch_->Hold(true);
  const std::vector<Pending*> all = SubmitSome(5);
  for (int node = 0; node < 2; ++node) switch_->AwaitCalls(node, kNodeSlots);
  Begin();
  ExpectAll(all, absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(all.back()->status.message()),
              HasSubstr("reduce-scatter group \"a\": the nodes' generation was ended (got 1, want 2)"));
  ExpectUntouched();
  switch_->Hold(false);
  ExpectThatTheNextGenerationWorks();
}

TEST_P(NodeCollectiveFailureTest, BeginEndsWhatDevicesAreAddingWhenTheyAreDone) {
  absl::Notification goes_on;
  devices_[0]->Submit(StreamId::kPostBackward,
                      {"block", {}, [&](const absl::Status&) { goes_on.WaitForNotificationWithTimeout(kLimit); }});
  Pending* const adding = SubmitTo(0);
  nodes_[0].collective->Begin(2);
  absl::Notification drained;
  devices_[1]->Submit(StreamId::kPostBackward, {"drain", {}, [&](const absl::Status&) { drained.Notify(); }});
  drained.WaitForNotification();
  EXPECT_FALSE(adding->done.HasBeenNotified()) << "its slots are still read";
  goes_on.Notify();
  EXPECT_EQ(Await(adding).code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(switch_->calls(0).empty());
  nodes_[1].collective->Begin(2);
  generation_ = 2;
  ExpectThatTheNextGenerationWorks();
}

TEST_P(NodeCollectiveFailureTest, WhatIsThereTooLateIsNotWritten) {
  switch_->IgnoreBegin();
  switch_->Hold(true);
  const std::vector<Pending*> all = SubmitSome(3);
  for (int node = 0; node < 2; ++node) switch_->AwaitCalls(node, kNodeSlots);
  Begin();
  EXPECT_FALSE(all[0]->done.HasBeenNotified()) << "the exchange still has its slot";
  switch_->Hold(false);
  ExpectAll(all, absl::StatusCode::kAborted);
  ExpectUntouched();
  ExpectThatTheNextGenerationWorks();
}

TEST_P(NodeCollectiveFailureTest, NewerRequestsBeginAGenerationAndOlderAreRefused) {
  switch_->Hold(true);
  const std::vector<Pending*> all = SubmitSome(4);
  generation_ = 5;
  sequence_ = 0;
  Refer(given_);
  const std::vector<Pending*> newer = NodeCollectiveTest::Submit(given_);
  ExpectAll(all, absl::StatusCode::kAborted);
  switch_->Hold(false);
  ExpectAll(newer, absl::StatusCode::kOk);
  ExpectAsReferred({given_});
  generation_ = 4;
  Pending* const older = SubmitTo(0);
  EXPECT_EQ(Await(older).code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(older->status.message()), HasSubstr("generation is over (got 4, want 5)"));
  nodes_[0].collective->Begin(3);  // nothing
  generation_ = 5;
  ExpectAll(NodeCollectiveTest::Submit(given_), absl::StatusCode::kOk);
}

TEST_P(NodeCollectiveFailureTest, AnExchangeErrorEndsTheGenerationFromThatSumOn) {
  switch_->FailAt(1, absl::UnavailableError("node 1 is gone"));
  switch_->Hold(true);
  const std::vector<Pending*> all = SubmitSome(6);
  for (int node = 0; node < 2; ++node) switch_->AwaitCalls(node, kNodeSlots);
  switch_->Hold(false);
  // The first may end as the second has; what comes after it cannot be right.
  for (size_t i = 2; i < all.size(); ++i) {
    EXPECT_EQ(Await(all[i]).code(), absl::StatusCode::kUnavailable) << all[i]->status;
    EXPECT_THAT(std::string(all[i]->status.message()), HasSubstr("node 1 is gone"));
  }
  ExpectAll({SubmitTo(0), SubmitTo(1)}, absl::StatusCode::kUnavailable);
  switch_->FailNoMore();
  ExpectThatTheNextGenerationWorks();
}

TEST_P(NodeCollectiveFailureTest, ADeviceErrorEndsItsNodesGenerationBeforeTheOthers) {
  nodes_[0].devices[1]->FailWith(absl::UnavailableError("device 1 is gone"));
  const std::vector<Pending*> all = SubmitSome(4);
  for (size_t i = 0; i < all.size(); i += 2) {
    EXPECT_EQ(Await(all[i]).code(), absl::StatusCode::kUnavailable) << all[i]->status;
    EXPECT_THAT(std::string(all[i]->status.message()), HasSubstr("device 1 is gone"));
  }
  EXPECT_TRUE(switch_->calls(0).empty());
  EXPECT_FALSE(all[1]->done.HasBeenNotified()) << "the other node waits for this one";
  nodes_[0].devices[1]->FailWith(absl::OkStatus());
  Begin();
  for (size_t i = 1; i < all.size(); i += 2) EXPECT_EQ(Await(all[i]).code(), absl::StatusCode::kAborted);
  ExpectUntouched();
  ExpectThatTheNextGenerationWorks();
}

TEST_P(NodeCollectiveFailureTest, AnErrorOfADeviceThatWritesIsTheResult) {
  switch_->Hold(true);
  const std::vector<Pending*> all = SubmitSome(1);
  for (int node = 0; node < 2; ++node) switch_->AwaitCalls(node, 1);
  nodes_[0].devices[0]->FailWith(absl::UnavailableError("device 0 is gone"));
  switch_->Hold(false);
  EXPECT_EQ(Await(all[0]).code(), absl::StatusCode::kUnavailable) << all[0]->status;
  EXPECT_TRUE(Await(all[1]).ok()) << all[1]->status;
  nodes_[0].devices[0]->FailWith(absl::OkStatus());
  ExpectThatTheNextGenerationWorks();
}

TEST_P(NodeCollectiveFailureTest, TheEndOfTheCollectiveIsThatOfItsRequests) {
  switch_->Hold(true);
  const std::vector<Pending*> all = SubmitSome(5);
  switch_->AwaitCalls(0, kNodeSlots);
  nodes_[0].collective.reset();
  for (size_t i = 0; i < all.size(); i += 2) {
    const absl::Status status = Await(all[i]);
    // Of the exchange, where it was there.
    EXPECT_TRUE(absl::IsCancelled(status) || absl::IsAborted(status)) << status;
  }
  EXPECT_TRUE(absl::IsCancelled(all[8]->status)) << all[8]->status;
  ExpectUntouched();
}

TEST_P(NodeCollectiveFailureTest, MalformedRequestsAreRefusedAndTakeNoSequence) {
  const std::vector<std::pair<const char*, std::function<void(ReduceScatterRequest&)>>> malformed = {
      {"no plan", [](auto& r) { r.plan = nullptr; }},
      {"wrong number of modes", [](auto& r) { r.modes.pop_back(); }},
      {"zeros are not of every rank", [](auto& r) { r.zeros.resize(1); }},
      {"no sum over nodes is named", [](auto& r) { r.nodes.reset(); }},
      {"presence mask of all nodes has the wrong length (got 3, want 2)", [](auto& r) { r.nodes->present.resize(3); }},
      {"a rank gives what no node does (got parameter \"a.v\"; rank=0)", [](auto& r) { r.nodes->present[1] = false; }},
      {"not the next sum of generation 1 (got sequence 1, want 0)", [](auto& r) { r.nodes->sequence = 1; }},
  };
  for (const auto& [message, change] : malformed) {
    Pending* const pending = SubmitTo(0, change);
    EXPECT_EQ(Await(pending).code(), absl::StatusCode::kInvalidArgument) << message;
    EXPECT_THAT(std::string(pending->status.message()), HasSubstr(message));
  }
  ExpectUntouched();
  Check({given_});
}

TEST_P(NodeCollectiveFailureTest, APartThatIsLargerThanItsSlotIsRefused) {
  std::vector<Device*> of_ranks = {nodes_[0].devices[0].get(), nodes_[0].devices[1].get()};
  NodeSwitch other(1, 1);
  NodeCollective small(of_ranks, other.Exchange(0), nodes_[0].staging_at, /*slot_bytes=*/64);
  auto pending = std::make_shared<Pending>();
  absl::Notification done;
  small.ReduceScatter(Request(0, given_, *pending), [&](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("does not fit into its staging (got "));
    done.Notify();
  });
  EXPECT_TRUE(done.WaitForNotificationWithTimeout(kLimit));
}

TEST_P(NodeCollectiveFailureTest, ItSaysWhoAdds) {
  EXPECT_STREQ(nodes_[1].collective->name(), "nodes");
  EXPECT_EQ(nodes_[1].collective->Describe(), "nodes: node 1 of a test");
  EXPECT_TRUE(nodes_[1].collective->may_hold_requests());
}

SHARDD_FOR_EACH_NODE_DEVICE(NodeCollectiveFailureTest);

}  // namespace
}  // namespace shardd
