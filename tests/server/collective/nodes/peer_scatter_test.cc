// Sums over nodes of which each node has its own pieces alone, over queues and over the daemons' sockets.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "absl/time/clock.h"
#include "tests/server/collective/nodes/peer_world.h"

namespace shardd::testing {
namespace {

using ::testing::HasSubstr;

// Parts by node; each may have several, or none.
using Shape = std::vector<std::vector<int64_t>>;

std::unique_ptr<Given> GivenOf(const Shape& shape) {
  std::vector<int64_t> numels;
  for (const std::vector<int64_t>& of_node : shape) numels.insert(numels.end(), of_node.begin(), of_node.end());
  auto given = std::make_unique<Given>(numels);
  size_t at = 0;
  for (size_t node = 0; node < shape.size(); ++node) {
    for (size_t i = 0; i < shape[node].size(); ++i, ++at) {
      given->parts[at].node = static_cast<int>(node);
      given->parts[at].rank = static_cast<int>(i);
    }
  }
  return given;
}

struct Round {
  Round(PeerWorld& world, const Shape& shape, uint32_t seed) {
    std::vector<std::vector<float>> values;
    for (int node = 0; node < world.nodes; ++node) {
      given.push_back(GivenOf(shape));
      given.back()->Fill(seed * 100 + static_cast<uint32_t>(node));
      values.push_back(given.back()->Values());
    }
    want = SumOf(values);
  }
  // The pieces of each node's place are the sums.
  void Check(int places) const {
    for (size_t node = 0; node < given.size(); ++node) {
      const absl::Status status = given[node]->Wait();
      ASSERT_TRUE(status.ok()) << "node " << node << ": " << status;
      size_t at = 0;
      for (const NodePart& part : given[node]->parts) {
        const std::vector<float> own(part.data, part.data + part.numel);
        const auto first = want.begin() + static_cast<int64_t>(at);
        if (part.node == static_cast<int>(node) % places) {
          ASSERT_TRUE(SameBits(own, {first, first + part.numel})) << "node " << node << " rank " << part.rank;
        }
        at += static_cast<size_t>(part.numel);
      }
    }
  }
  std::vector<std::unique_ptr<Given>> given;
  std::vector<float> want;
};

struct Case {
  int nodes;
  bool sockets;
  int row = nodes;  // nodes of one
};
class PeerScatterTest : public ::testing::TestWithParam<Case> {
 protected:
  int nodes() const { return GetParam().nodes; }
  int places() const { return GetParam().row; }
  // Of which every node of a row has `numels`.
  Shape Even(const std::vector<int64_t>& numels) const { return Shape(static_cast<size_t>(places()), numels); }
};

INSTANTIATE_TEST_SUITE_P(Nodes, PeerScatterTest,
                         ::testing::Values(Case{2, false}, Case{3, false}, Case{5, false}, Case{2, true}, Case{3, true},
                                           Case{4, false, 2}, Case{6, false, 3}, Case{6, false, 2}, Case{4, true, 2}),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           const Case& of = info.param;
                           return absl::StrCat(of.nodes, of.row < of.nodes ? absl::StrCat("InRowsOf", of.row) : "",
                                               of.sockets ? "OverSockets" : "OverQueues");
                         });

TEST_P(PeerScatterTest, EachNodeHasTheSumsOfItsPieces) {
  PeerWorld world(nodes(), GetParam().sockets, 4 << 20, 2 << 20, places());
  std::vector<Shape> shapes = {Even({1000, 1000}), Even({1}), Even({17, 1, 16}), Even({300'000})};
  shapes.push_back(Even({}));  // all is one node's
  shapes.back().back() = {64, 5, (2 << 20) - 100};
  shapes.push_back(Even({33}));
  shapes.back().front() = {};
  for (size_t i = 0; i < shapes.size(); ++i) {
    Round round(world, shapes[i], static_cast<uint32_t>(i));
    for (int node = 0; node < nodes(); ++node) world.Scatter(node, 1, i, *round.given[node]);
    round.Check(places());
    ASSERT_FALSE(HasFatalFailure()) << "shape " << i;
  }
}

// A node that adds nothing is done as soon as others have what it gave, and may be many sums ahead of who adds slowly.
TEST_P(PeerScatterTest, NodesAtDifferentSpeedsAndBothKindsInTurn) {
  constexpr int kSums = 120;
  PeerWorld world(nodes(), GetParam().sockets, 60'000, 20'000, places());
  std::vector<std::unique_ptr<Round>> rounds;
  std::minstd_rand random(7);
  for (int i = 0; i < kSums; ++i) {
    Shape shape = Even({});
    for (std::vector<int64_t>& of_node : shape) {
      for (uint32_t part = random() % 3; part > 0; --part) of_node.push_back(1 + static_cast<int64_t>(random() % 4000));
    }
    shape[random() % shape.size()] = {1 + static_cast<int64_t>(random() % 10'000)};
    rounds.push_back(std::make_unique<Round>(world, shape, static_cast<uint32_t>(i)));
  }
  std::vector<std::thread> threads;
  for (int node = 0; node < nodes(); ++node) {
    threads.emplace_back([&, node] {
      std::minstd_rand pace(static_cast<uint32_t>(node) + 1);
      for (int i = 0; i < kSums; ++i) {
        if (pace() % 8 == 0) absl::SleepFor(absl::Microseconds(pace() % 2000));
        if (i >= 4) (void)rounds[i - 4]->given[node]->Wait();
        // An all-reduce leaves the sums in each node's own pieces as well.
        i % 5 == 3 ? world.Add(node, 1, i, *rounds[i]->given[node])
                   : world.Scatter(node, 1, i, *rounds[i]->given[node]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::unique_ptr<Round>& round : rounds) {
    round->Check(places());
    ASSERT_FALSE(HasFatalFailure());
  }
}

TEST_P(PeerScatterTest, ALostNodeEndsItOnAllOthers) {
  PeerWorld world(nodes(), GetParam().sockets, 60'000, 20'000, places());
  Round round(world, Even({5000}), 1);
  for (int node = 0; node + 1 < nodes(); ++node) world.Scatter(node, 1, 0, *round.given[node]);
  absl::SleepFor(absl::Milliseconds(20));
  world.Leave(nodes() - 1);
  for (int node = 0; node + 1 < nodes(); ++node) {
    EXPECT_EQ(round.given[node]->Wait().code(), absl::StatusCode::kUnavailable) << node;
  }
}

TEST(PeerScatter, WhatNodesDoNotAgreeOnIsNamed) {
  const auto a = GivenOf({{100}, {200}}), b = GivenOf({{100}, {201}});
  const auto scattered = GivenOf({{100}, {100}}), whole = GivenOf({{100}, {100}});
  for (const auto* given : {&a, &b, &scattered, &whole}) (*given)->Set(1);
  PeerWorld world(2, false, 1000, 800);  // ends what the other node is never told
  world.Scatter(0, 1, 0, *a);
  world.Scatter(1, 1, 0, *b);
  EXPECT_THAT(b->Wait().message(), HasSubstr("different numbers of elements"));
  world.Scatter(0, 2, 0, *scattered);
  world.Add(1, 2, 0, *whole);
  ASSERT_TRUE(PollUntil([&] { return scattered->done() || whole->done(); }));
  for (const auto* given : {&scattered, &whole}) EXPECT_FALSE((*given)->done() && (*given)->Wait().ok());
}

TEST(PeerScatter, PartsThatAreNoNodesInOrderAreRefused) {
  PeerWorld world(2, false, 1000, 300);
  const auto refused = [&](std::unique_ptr<Given> given, const char* text) {
    given->Set(1);
    world.Scatter(0, 1, 0, *given);
    const absl::Status status = given->Wait();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(text));
  };
  auto descending = GivenOf({{10}, {10}});
  std::swap(descending->parts[0].node, descending->parts[1].node);
  refused(std::move(descending), "in their order");
  auto none = GivenOf({{10}, {10}});
  none->parts[0].node = -1;
  refused(std::move(none), "in their order");
  auto third = GivenOf({{10}, {10}});
  third->parts[1].node = 2;
  refused(std::move(third), "in their order");
  refused(GivenOf({{600}, {10}}), "this node's piece out of range (got 600");
}

}  // namespace
}  // namespace shardd::testing
