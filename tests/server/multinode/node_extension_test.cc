// Node 0 where ranks of nodes ask to train more: messages in, messages out.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/clock/monotonic_now.h"
#include "server/multinode/backwards.h"
#include "server/multinode/node_coordinator.h"
#include "tests/server/multinode/node_world.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class NodeExtensionTest : public ::testing::Test {
 protected:
  NodeExtensionTest()
      : plan_(testing::NodesPlan(3, /*allow_missing=*/false)),
        coordinator_(
            plan_, /*generation=*/1,
            [this](int node, v1::PeerMessage message) { sent_.emplace_back(node, std::move(message)); }, [] {},
            [](int) { ADD_FAILURE() << "nobody has a state"; }) {
    for (int node = 0; node < 3; ++node) {
      coordinator_.OnUp(node);
      v1::PeerMessage holds;
      holds.mutable_holds();
      if (node != 0) coordinator_.OnMessage(node, holds);
    }
    v1::PeerMessage values;
    for (size_t param = 0; param < plan_->params.size(); ++param) values.mutable_values()->add_digests(param);
    for (int node = 0; node < 3; ++node) Say(node, values);
    sent_.clear();
  }
  void Say(int node, v1::PeerMessage message) {
    message.set_generation(coordinator_.generation());
    coordinator_.OnMessage(node, message);
  }
  void Extends(int node, bool made = false, const std::string& digest = "wide", uint64_t version = 1) {
    v1::PeerMessage message;
    message.mutable_extends()->set_version(version);
    message.mutable_extends()->set_plan_digest(digest);
    message.mutable_extends()->set_what(absl::StrCat("parameter \"", digest, "\""));
    message.mutable_extends()->set_made(made);
    Say(node, std::move(message));
  }
  static v1::PeerMessage Ready() {
    v1::PeerMessage message;
    message.mutable_ready()->mutable_key()->set_step(1);
    message.mutable_ready()->mutable_key()->set_group(1);
    message.mutable_ready()->mutable_gives()->set_present("\x01");
    message.mutable_ready()->mutable_gives()->set_fresh(std::string(1, '\0'));
    return message;
  }
  // Of MayExtend, as "node made" each.
  std::string Told() {
    std::string told;
    for (const auto& [node, message] : sent_) {
      if (message.has_may_extend()) absl::StrAppend(&told, node, message.may_extend().made() ? " made, " : ", ");
    }
    sent_.clear();
    return told;
  }
  // Why the generation has ended; empty: it has not.
  std::string Ended() {
    for (const auto& [node, message] : sent_) {
      if (message.has_begin() && node == 2) return message.begin().message();
    }
    return "";
  }

  const std::shared_ptr<const ShardPlan> plan_;
  std::vector<std::pair<int, v1::PeerMessage>> sent_;
  NodeCoordinator coordinator_;
};

TEST_F(NodeExtensionTest, NobodyExtendsBeforeAllAskAndAllHaveMadeIt) {
  Extends(0);
  Extends(2);
  EXPECT_EQ(Told(), "");
  EXPECT_THAT(coordinator_.Waiting(), HasSubstr("node 1 (host1:7000) has not asked to train parameter \"wide\""));
  Extends(1);
  EXPECT_EQ(Told(), "2, 1, 0, ");
  Extends(1, /*made=*/true);
  Extends(0, /*made=*/true);
  EXPECT_EQ(Told(), "");
  EXPECT_THAT(coordinator_.Waiting(), HasSubstr("node 2 (host2:7000) has not made what trains parameter \"wide\""));
  Extends(2, /*made=*/true);
  EXPECT_EQ(Told(), "2 made, 1 made, 0 made, ") << "node 0, which ends its links, hears it last";
  EXPECT_THAT(Ended(), IsEmpty());
}

TEST_F(NodeExtensionTest, NodesThatTrainDifferentParametersAreNamed) {
  Extends(0, false, "a");
  Extends(1, false, "b");
  EXPECT_THAT(Ended(), AllOf(HasSubstr("got parameter \"b\", on node 1 (host1:7000)"),
                             HasSubstr("parameter \"a\", on node 0 (host0:7000)")));
  EXPECT_EQ(Told(), "");
}

TEST_F(NodeExtensionTest, ANodeThatGoesOnIsNamedAtOnce) {
  Extends(0);
  Say(1, Ready());
  EXPECT_THAT(Ended(), AllOf(HasSubstr("rank 0 of node 0 (host0:7000) trains parameter \"wide\" from here on"),
                             HasSubstr("rank 0 of node 1 (host1:7000) does not")));
}

TEST_F(NodeExtensionTest, SoIsOneThatWentOnBefore) {
  Say(1, Ready());
  Extends(0);
  EXPECT_THAT(Ended(), HasSubstr("rank 0 of node 1 (host1:7000) does not"));
}

TEST_F(NodeExtensionTest, ALostLinkBeforeTheLastWordEndsIt) {
  for (int node = 0; node < 3; ++node) Extends(node);
  Extends(0, /*made=*/true);
  Extends(1, /*made=*/true);
  sent_.clear();
  coordinator_.OnDown(1, absl::UnavailableError("the link broke"));
  EXPECT_THAT(Ended(), HasSubstr("node 1 (host1:7000) is lost"));
  sent_.clear();
  Extends(2, /*made=*/true);
  EXPECT_EQ(Told(), "") << "it is not its turn any more";
}

TEST_F(NodeExtensionTest, AnotherVersionAndASecondWordAreRefused) {
  Extends(0, false, "wide", 2);
  EXPECT_THAT(Ended(), HasSubstr("not its turn (got version 2, want 1)"));
  sent_.clear();
  Extends(1);
  Extends(1);
  EXPECT_THAT(Ended(), HasSubstr("not its turn"));
  sent_.clear();
  Extends(1, /*made=*/true);
  EXPECT_THAT(Ended(), HasSubstr("has made what trains"));
}

// Memory is allocated; a node that has not asked is waited for as for anything.
TEST_F(NodeExtensionTest, WhatIsMadeTakesLongerThanAnyWord) {
  for (int node = 0; node < 3; ++node) Extends(node);
  Extends(0, /*made=*/true);
  Extends(1, /*made=*/true);
  sent_.clear();
  coordinator_.CheckSilence(MonotonicNow() + absl::Minutes(9), absl::Seconds(10));
  EXPECT_THAT(Ended(), IsEmpty());
  coordinator_.CheckSilence(MonotonicNow() + absl::Minutes(11), absl::Seconds(10));
  EXPECT_THAT(Ended(), HasSubstr("node 2 (host2:7000) has not made what trains parameter \"wide\""));
  sent_.clear();
  Extends(0);
  coordinator_.CheckSilence(MonotonicNow() + absl::Hours(1), absl::Seconds(10));
  EXPECT_THAT(Ended(), HasSubstr("has not asked to train"));
}

}  // namespace
}  // namespace shardd
