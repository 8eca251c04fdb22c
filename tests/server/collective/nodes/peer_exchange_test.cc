// Sums over nodes, over queues of this process and over the daemons' sockets.

#include "server/collective/nodes/links/peer_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <random>
#include <thread>

#include "absl/time/clock.h"
#include "tests/server/collective/nodes/peer_world.h"
#include "tests/testing/sanitizers.h"

namespace shardd::testing {
namespace {

using ::testing::HasSubstr;

// One sum on all nodes.
struct Round {
  Round(PeerWorld& world, const std::vector<int64_t>& numels, uint32_t seed) {
    std::vector<std::vector<float>> values;
    for (int node = 0; node < world.nodes; ++node) {
      given.push_back(std::make_unique<Given>(numels));
      given.back()->Fill(seed * 100 + static_cast<uint32_t>(node));
      values.push_back(given.back()->Values());
    }
    want = SumOf(values);
  }
  void Check() const {
    for (size_t node = 0; node < given.size(); ++node) {
      const absl::Status status = given[node]->Wait();
      ASSERT_TRUE(status.ok()) << "node " << node << ": " << status;
      ASSERT_TRUE(SameBits(given[node]->Values(), want)) << "node " << node;
    }
  }
  std::vector<std::unique_ptr<Given>> given;
  std::vector<float> want;
};

struct Case {
  int nodes;
  bool sockets;
};
class PeerExchangeTest : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(Nodes, PeerExchangeTest,
                         ::testing::Values(Case{2, false}, Case{3, false}, Case{5, false}, Case{2, true}, Case{3, true},
                                           Case{5, true}),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           return absl::StrCat(info.param.nodes, info.param.sockets ? "OverSockets" : "OverQueues");
                         });

TEST(PeerExchangeMemory, WhatTheSystemHasNotIsRefused) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer ends a process that asks for so much";
  PeerWorld world(2, /*sockets=*/false, 64);
  const auto made = PeerExchange::Make(world.links[0].get(), int64_t{1} << 50, 2);
  EXPECT_TRUE(absl::IsResourceExhausted(made.status())) << made.status();
  EXPECT_THAT(std::string(made.status().message()), HasSubstr("no memory for what 1 other node(s) send"));
}

TEST_P(PeerExchangeTest, AllNodesHaveTheSumInTheOrderOfNodes) {
  PeerWorld world(GetParam().nodes, GetParam().sockets, 1 << 20);
  const std::vector<std::vector<int64_t>> shapes = {{1000, 1000, 1000}, {1},      {3}, {17, 1, 16}, {64}, {5, 5},
                                                    {300'000, 7},       {1 << 20}};
  for (size_t i = 0; i < shapes.size(); ++i) {
    Round round(world, shapes[i], static_cast<uint32_t>(i));
    for (int node = 0; node < world.nodes; ++node) {
      world.Add(node, 1, i, *round.given[node]);
    }
    round.Check();
    ASSERT_FALSE(HasFatalFailure()) << "shape " << i;
  }
}

TEST_P(PeerExchangeTest, MoreThanMayBeOnItsWayAtATime) {
  PeerWorld world(GetParam().nodes, GetParam().sockets, 6 << 20);
  Round round(world, {(5 << 20) + 1, 4711}, 1);
  for (int node = 0; node < world.nodes; ++node) {
    world.Add(node, 1, 0, *round.given[node]);
  }
  round.Check();
}

// Each node begins sums when it likes, several at a time, and more than there are slots.
TEST_P(PeerExchangeTest, NodesAtDifferentSpeeds) {
  constexpr int kSums = 120;
  PeerWorld world(GetParam().nodes, GetParam().sockets, 20'000);
  std::vector<std::unique_ptr<Round>> rounds;
  std::minstd_rand random(7);
  for (int i = 0; i < kSums; ++i) {
    rounds.push_back(std::make_unique<Round>(
        world, std::vector<int64_t>{1 + static_cast<int64_t>(random() % 9000), 1 + static_cast<int64_t>(random() % 40)},
        static_cast<uint32_t>(i)));
  }
  std::vector<std::thread> threads;
  for (int node = 0; node < world.nodes; ++node) {
    threads.emplace_back([&, node] {
      std::minstd_rand pace(static_cast<uint32_t>(node) + 1);
      for (int i = 0; i < kSums; ++i) {
        if (pace() % 8 == 0) {
          absl::SleepFor(absl::Microseconds(pace() % 2000));
        }
        if (i >= 4) {
          (void)rounds[i - 4]->given[node]->Wait();
        }
        world.Add(node, 1, i, *rounds[i]->given[node]);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::unique_ptr<Round>& round : rounds) {
    round->Check();
    ASSERT_FALSE(HasFatalFailure());
  }
}

// A new generation at any moment: each sum is either right on all nodes that have it, or given up, and what is given up
// is not touched any more.
TEST_P(PeerExchangeTest, GenerationsEndAtEveryMoment) {
  PeerWorld world(GetParam().nodes, GetParam().sockets, 300'000);
  std::minstd_rand random(3);
  std::deque<std::unique_ptr<Round>> given_up;
  int aborted = 0;
  for (uint64_t generation = 1; generation <= 60; ++generation) {
    std::vector<std::unique_ptr<Round>> rounds;
    for (int i = 0; i < 3; ++i) {
      rounds.push_back(std::make_unique<Round>(world, std::vector<int64_t>{100'000, 1000 + i},
                                               static_cast<uint32_t>(generation * 10) + i));
    }
    std::vector<std::thread> threads;
    for (int node = 0; node < world.nodes; ++node) {
      const uint32_t first = random() % 3000;
      const uint32_t last = random() % 12'000;
      threads.emplace_back([&, node, first, last] {
        world.exchanges[node]->Begin(generation);
        for (size_t i = 0; i < rounds.size(); ++i) {
          world.Add(node, generation, i, *rounds[i]->given[node]);
          absl::SleepFor(absl::Microseconds(first / 3));
        }
        absl::SleepFor(absl::Microseconds(last));
        world.exchanges[node]->Begin(generation + 1);
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    for (std::unique_ptr<Round>& round : rounds) {
      for (int node = 0; node < world.nodes; ++node) {
        const absl::Status status = round->given[node]->Wait();
        if (status.ok()) {
          ASSERT_TRUE(SameBits(round->given[node]->Values(), round->want)) << "generation " << generation;
        } else {
          ASSERT_TRUE(absl::IsAborted(status)) << status;
          ++aborted;
        }
        round->given[node]->Set(-4711.0f);
      }
      given_up.push_back(std::move(round));
    }
  }
  EXPECT_GT(aborted, 0);
  for (const std::unique_ptr<Round>& round : given_up) {
    for (const std::unique_ptr<Given>& given : round->given) {
      const std::vector<float> values = given->Values();
      ASSERT_TRUE(SameBits(values, std::vector<float>(values.size(), -4711.0f))) << "written after it was told";
    }
  }
}

TEST_P(PeerExchangeTest, ALostNodeEndsTheSumButNotLaterGenerations) {
  PeerWorld world(GetParam().nodes, GetParam().sockets, 2 << 20);
  const int lost = world.nodes - 1;
  for (uint64_t generation = 1; generation <= 6; ++generation) {
    Round round(world, {1 << 20, 77}, static_cast<uint32_t>(generation));
    const bool gives = generation % 2 == 0;  // it is lost in the middle, or before it has given anything
    for (int node = 0; node < world.nodes; ++node) {
      if (node != lost || gives) {
        world.Add(node, generation, 0, *round.given[node]);
      }
    }
    world.Leave(lost);
    for (int node = 0; node < lost; ++node) {
      const absl::Status status = round.given[node]->Wait();
      EXPECT_TRUE(absl::IsUnavailable(status) || (gives && status.ok())) << status;
      if (!status.ok()) {
        EXPECT_THAT(status.message(), HasSubstr(absl::StrCat("node ", lost)));
        Given later({10});
        world.Add(node, generation, 1, later);
        EXPECT_TRUE(absl::IsUnavailable(later.Wait())) << "the generation has ended";
      }
    }
    if (gives) {
      (void)round.given[lost]->Wait();
    }
    for (int node = 0; node < lost; ++node) {  // sums end before the link is told to have ended
      ASSERT_TRUE(PollUntil([&] { return !world.routers[node]->up(lost); }));
    }
    world.Join(lost);
    world.WaitUp();
    Round next(world, {5000}, 1);
    ++generation;
    for (int node = 0; node < world.nodes; ++node) {
      world.Add(node, generation, 0, *next.given[node]);
    }
    next.Check();
    ASSERT_FALSE(HasFatalFailure()) << "generation " << generation;
  }
}

TEST_P(PeerExchangeTest, EndWhileSumsAreUnderWay) {
  for (int i = 0; i < 10; ++i) {
    std::vector<std::unique_ptr<Given>> given;
    {
      PeerWorld world(GetParam().nodes, GetParam().sockets, 1 << 20);
      for (int node = 0; node < world.nodes; ++node) {
        given.push_back(std::make_unique<Given>(std::vector<int64_t>{1 << 20}));
        given.back()->Fill(1);
        world.Add(node, 1, 0, *given.back());
      }
      absl::SleepFor(absl::Microseconds(300 * i));
    }
    for (const std::unique_ptr<Given>& one : given) {
      EXPECT_TRUE(one->done()) << "told when the exchange is gone";
    }
  }
}

TEST_P(PeerExchangeTest, DataOfAGenerationNotYetBegunIsKept) {
  PeerWorld world(GetParam().nodes, GetParam().sockets, 10'000);
  Given old({1000});
  old.Fill(1);
  world.Add(0, 1, 0, old);
  Round round(world, {9000}, 2);
  for (int node = 1; node < world.nodes; ++node) {
    world.exchanges[node]->Begin(2);
    world.Add(node, 2, 0, *round.given[node]);
  }
  EXPECT_TRUE(absl::IsAborted(old.Wait())) << "others have begun the next";
  Given late({1000});
  world.Add(0, 1, 1, late);
  EXPECT_TRUE(absl::IsAborted(late.Wait()));
  world.exchanges[0]->Begin(2);
  world.Add(0, 2, 0, *round.given[0]);
  round.Check();
}

TEST_P(PeerExchangeTest, NodesThatDiffer) {
  for (const auto& [a, b] : {std::pair<int64_t, int64_t>{112, 104}, {16, 20}, {5000, 6000}}) {
    PeerWorld world(GetParam().nodes, GetParam().sockets, 10'000);
    std::vector<std::unique_ptr<Given>> given;
    for (int node = 0; node < world.nodes; ++node) {
      given.push_back(std::make_unique<Given>(std::vector<int64_t>{node == 1 ? b : a}));
      given.back()->Fill(1);
      world.Add(node, 1, 0, *given.back());
    }
    // Whoever sees it first gives nothing more; the others are told by the next generation.
    const auto told = [&] {
      return std::find_if(given.begin(), given.end(), [](const std::unique_ptr<Given>& one) { return one->done(); });
    };
    ASSERT_TRUE(PollUntil([&] { return told() != given.end(); })) << a << " and " << b;
    const absl::Status status = (*told())->Wait();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr("numbers of elements"));
    for (int node = 0; node < world.nodes; ++node) {
      world.exchanges[node]->Begin(2);
      const absl::Status end = given[node]->Wait();
      EXPECT_TRUE(absl::IsInvalidArgument(end) || absl::IsAborted(end)) << "node " << node << ": " << end;
    }
  }
}

TEST(PeerExchangeCallsTest, AreChecked) {
  PeerWorld world(2, false, 1000);
  Given gap({10});
  world.Add(0, 1, 1, gap);
  EXPECT_TRUE(absl::IsInvalidArgument(gap.Wait())) << gap.Wait();
  Given large({1001});
  world.Add(0, 1, 0, large);
  EXPECT_TRUE(absl::IsInvalidArgument(large.Wait())) << large.Wait();
  Given old({10});
  world.Add(0, 0, 0, old);
  EXPECT_TRUE(absl::IsAborted(old.Wait())) << old.Wait();
}

TEST(PeerExchangeCallsTest, DataThatCannotBeIsRefused) {
  struct Bad {
    uint64_t sequence;
    int64_t offset, numel, count;
    bool is_sum;
  };
  const std::vector<Bad> all = {
      {0, 0, 2000, 10, false},    // more than a sum can have
      {0, 16, 1000, 10, false},   // not from the beginning
      {0, 512, 1000, 10, false},  // of the other node's piece
      {0, 0, 1000, 513, false},   // beyond the piece
      {0, -4, 1000, 4, false},    // before it
      {0, 512, 1000, 10, true},   // a sum that nobody waits for
      {0, INT64_MAX - 4, 1000, 10, false},
  };
  for (const Bad& bad : all) {
    PeerWorld world(2, false, 1000);
    v1::PeerData header;
    header.set_generation(1);
    header.set_sequence(bad.sequence);
    header.set_offset(bad.offset);
    header.set_numel(bad.numel);
    header.set_is_sum(bad.is_sum);
    world.exchanges[0]->OnData(1, header, std::string(bad.count * 4, 'x'));
    Given given({1000});
    world.Add(0, 1, 0, given);
    EXPECT_TRUE(absl::IsInvalidArgument(given.Wait())) << given.Wait() << " at " << bad.offset;
    EXPECT_THAT(given.Wait().message(), HasSubstr("node 1"));
    world.exchanges[0]->Begin(2);
    Given next({1000});
    Given other({1000});
    next.Fill(1);
    other.Fill(2);
    world.Add(0, 2, 0, next);
    world.Add(1, 2, 0, other);
    EXPECT_TRUE(next.Wait().ok()) << next.Wait();
    EXPECT_TRUE(other.Wait().ok()) << other.Wait();
  }
}

TEST(PeerExchangeCallsTest, NodeThatIsTooFarAheadIsRefused) {
  PeerWorld world(2, false, 1000);
  v1::PeerData header;
  header.set_generation(1);
  header.set_numel(1000);
  const std::string bytes(512 * 4, '\0');
  for (uint64_t sequence = 0; sequence < PeerWorld::kSlots; ++sequence) {
    header.set_sequence(sequence);
    world.exchanges[0]->OnData(1, header, bytes);
  }
  header.set_sequence(PeerWorld::kSlots);
  world.exchanges[0]->OnData(1, header, bytes);
  Given given({1000});
  world.Add(0, 1, 0, given);
  EXPECT_TRUE(absl::IsInvalidArgument(given.Wait())) << given.Wait();
  EXPECT_THAT(given.Wait().message(), HasSubstr("not at hand"));
}

TEST(PeerExchangeCallsTest, LinkThatNobodyMissesEndsNothing) {
  PeerWorld world(2, false, 1000);
  world.exchanges[0]->Begin(1);
  world.exchanges[0]->OnDown(1, absl::UnavailableError("it has not called yet"));
  Round round(world, {100}, 1);
  world.Add(0, 1, 0, *round.given[0]);
  world.Add(1, 1, 0, *round.given[1]);
  round.Check();
}

}  // namespace
}  // namespace shardd::testing
