// Sums between nodes by NCCL: what is made when, what ends them, and that nothing hangs.

#include "server/collective/nodes/nccl/nccl_exchange.h"

#include <stdlib.h>

#include <atomic>

#include "server/collective/nodes/nccl/nccl_exchanges.h"
#include "tests/server/collective/nccl/nccl_exchange_fixture.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

// Of all nodes; counted and failed here.
std::atomic<int> g_made, g_ids;
std::atomic<bool> g_fail;
nccl::Table Counting() {
  g_made = g_ids = 0;
  nccl::Table table = fake_nccl::Table();
  table.CommInitRankConfig = [](ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
    ++g_made;
    return fake_nccl::Table().CommInitRankConfig(comm, ranks, id, rank, config);
  };
  table.GetUniqueId = [](ncclUniqueId* id) {
    ++g_ids;
    return fake_nccl::Table().GetUniqueId(id);
  };
  return table;
}

class NcclExchangeOfNodesTest : public NcclExchangeTest, public ::testing::WithParamInterface<int> {
 protected:
  void StartCounting(int ranks) {
    const nccl::Table table = Counting();
    Start(GetParam(), ranks);
    for (int node = 0; node < nodes(); ++node) {
      End(node);
      daemon(node).table = table;
      Make(node);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Nodes, NcclExchangeOfNodesTest, ::testing::Values(2, 3));

TEST_P(NcclExchangeOfNodesTest, SumsCoverAllNodesWithTheSameBitsEverywhere) {
  Start(GetParam(), /*ranks=*/2);
  EXPECT_THAT(daemon(1).exchange->Describe(), HasSubstr("made with the next sum"));
  BeginOnAll(1);
  std::vector<std::vector<std::shared_ptr<Pending>>> sums;
  for (uint64_t sequence = 0; sequence < 50; ++sequence) sums.push_back(SumOnAll(1, sequence));
  for (uint64_t sequence = 0; sequence < 50; ++sequence) ExpectSums(sums[sequence], sequence);
  EXPECT_THAT(daemon(1).exchange->Describe(), HasSubstr("attempt 1, made in"));
  EXPECT_THAT(daemon(1).exchange->Describe(), HasSubstr("; 50 sum(s)"));
}

TEST_P(NcclExchangeOfNodesTest, CommunicatorsAreKeptOverGenerationsInWhichNothingBroke) {
  StartCounting(/*ranks=*/2);
  for (uint64_t generation = 1; generation < 5; ++generation) {
    BeginOnAll(generation);
    for (uint64_t sequence = 0; sequence < 3; ++sequence) ExpectSums(generation, sequence);
  }
  EXPECT_EQ(g_ids, 2) << "one for each rank";
  EXPECT_EQ(g_made, 2 * nodes());
}

// Neither of these needs anything of the others to end; they hear of the generation by their own Begin.
TEST_P(NcclExchangeOfNodesTest, AGenerationsEndAbortsItsSumsAndCommunicatorsAreRemade) {
  StartCounting(/*ranks=*/2);
  BeginOnAll(1);
  ExpectSums(1, 0);
  const auto under_way = Sum(0, 1, 1);
  const auto behind_it = Sum(0, 1, 2);
  AwaitIssued(0, "sum 1");
  EXPECT_FALSE(under_way->done.HasBeenNotified());
  daemon(0).exchange->Begin(2);
  for (const auto& pending : {under_way, behind_it}) {
    EXPECT_EQ(Await(pending).code(), absl::StatusCode::kAborted) << pending->status;
  }
  for (int node = 1; node < nodes(); ++node) daemon(node).exchange->Begin(2);
  for (uint64_t sequence = 0; sequence < 3; ++sequence) ExpectSums(2, sequence);
  EXPECT_EQ(g_made, 2 * 2 * nodes());
  EXPECT_THAT(daemon(0).exchange->Describe(), HasSubstr("made 2 time(s); last given up because"));
}

// What the others have works, and is of no use.
TEST_P(NcclExchangeOfNodesTest, WhoComesBackHasAllMakeThemAnew) {
  StartCounting(/*ranks=*/1);
  uint64_t generation = 1;
  BeginOnAll(generation);
  ExpectSums(generation, 0);
  for (const int who : {1, 0}) {
    End(who);
    Make(who);
    BeginOnAll(++generation);
    ExpectSums(generation, 0);
    ExpectSums(generation, 1);
  }
  EXPECT_EQ(g_made, 3 * nodes());
  EXPECT_THAT(daemon(1).exchange->Describe(), HasSubstr("attempt 3, "));
}

TEST_P(NcclExchangeOfNodesTest, SumsWaitForALateIdUntilTheGenerationEnds) {
  Start(GetParam(), /*ranks=*/2);
  BeginOnAll(1);
  Hold(true);
  auto all = SumOnAll(1, 0);
  AwaitHeld(0, nodes() - 1);
  absl::SleepFor(absl::Milliseconds(20));
  for (const auto& pending : all) EXPECT_FALSE(pending->done.HasBeenNotified());
  Hold(false);
  ExpectSums(all, 0);
  BeginOnAll(2);
  End(0);
  Make(0);  // nobody has them any more
  daemon(0).exchange->Begin(2);
  Hold(true);
  all = SumOnAll(2, 0);
  AwaitHeld(0, nodes() - 1);
  BeginOnAll(3);
  for (const auto& pending : all) EXPECT_EQ(Await(pending).code(), absl::StatusCode::kAborted) << pending->status;
  Hold(false);  // what comes now is of a generation that is over
  ExpectSums(3, 0);
}

// Node 0 makes them; the others have not got their ids.
TEST_P(NcclExchangeOfNodesTest, AGenerationThatEndsWhileCommunicatorsAreMadeEndsThat) {
  StartCounting(/*ranks=*/2);
  BeginOnAll(1);
  Hold(true, /*only_of_0=*/true);
  const auto all = SumOnAll(1, 0);
  AwaitHeld(1, 1);
  for (int i = 0; i < 10000 && g_made < 2; ++i) absl::SleepFor(absl::Milliseconds(1));
  AwaitStatus(0, "being made");
  BeginOnAll(2);
  for (const auto& pending : all) EXPECT_EQ(Await(pending).code(), absl::StatusCode::kAborted) << pending->status;
  Hold(false);
  ExpectSums(2, 0);
}

// NCCL holds the thread that issues a pair's first call until the other half comes.
class NcclExchangeMovesTest : public NcclExchangeTest {
 protected:
  NcclExchangeMovesTest() {
    setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/1);  // as NcclLibrary::SetEnvironment
    moves_ = true;
  }
  ~NcclExchangeMovesTest() override { unsetenv("NCCL_RUNTIME_CONNECT"); }
};

// Node 1 comes to its first move when it has summed.
TEST_F(NcclExchangeMovesTest, AFirstMoveHoldsUpNoEarlierSum) {
  Start(/*nodes=*/2, /*ranks=*/2);
  for (uint64_t generation = 1; generation <= 2; ++generation) {  // in the second on communicators that are kept
    BeginOnAll(generation);
    const auto move = Move(0, generation, 0);
    const auto sum = Sum(1, generation, 0);
    AwaitIssued(0, "move 0");
    ExpectSums({Sum(0, generation, 0), sum}, 0);
    ExpectMoves({move, Move(1, generation, 0)});
  }
}

TEST_F(NcclExchangeMovesTest, AFirstSumHoldsUpNoEarlierMove) {
  Start(/*nodes=*/3, /*ranks=*/1);
  BeginOnAll(1);
  ExpectMoves({Move(0, 1, 0), Move(1, 1, 0), Move(2, 1, 0)});
  const auto sum = Sum(0, 1, 0);
  AwaitIssued(0, "sum 0");
  ExpectMoves({Move(0, 1, 1), Move(1, 1, 1), Move(2, 1, 1)});
  ExpectSums({sum, Sum(1, 1, 0), Sum(2, 1, 0)}, 0);
}

TEST_F(NcclExchangeMovesTest, ANodeThatLeavesWhileOthersAreGreetedEndsThat) {
  static std::atomic<bool> g_leaves;
  g_leaves = true;
  nccl::Table table = fake_nccl::Table();
  table.Send = [](const void* send, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                  cudaStream_t stream) {
    return g_leaves ? ncclSystemError : fake_nccl::Table().Send(send, count, dtype, peer, comm, stream);
  };
  Start(/*nodes=*/2, /*ranks=*/1);
  End(1);
  daemon(1).table = table;
  Make(1);
  BeginOnAll(1);
  const auto sum = Sum(0, 1, 0);
  const auto refused = Sum(1, 1, 0);
  EXPECT_THAT(std::string(Await(refused).message()), HasSubstr("ncclSend")) << refused->status;
  EXPECT_THAT(std::string(Await(sum).message()), HasSubstr("Connection closed by remote peer")) << sum->status;
  g_leaves = false;
  BeginOnAll(2);
  ExpectSums(2, 0);
  ExpectMoves({Move(0, 2, 0), Move(1, 2, 0)});
}

TEST_P(NcclExchangeOfNodesTest, NodesThatDoNotJoinInTimeAreAnError) {
  limit_ = absl::Milliseconds(200);
  Start(GetParam(), /*ranks=*/1);
  BeginOnAll(1);
  Hold(true, /*only_of_0=*/true);
  const auto all = SumOnAll(1, 0);
  EXPECT_EQ(Await(all[0]).code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(all[0]->status.message()), HasSubstr("not all nodes have joined"));
  EXPECT_FALSE(all[1]->done.HasBeenNotified());
  BeginOnAll(2);
  EXPECT_EQ(Await(all[1]).code(), absl::StatusCode::kAborted);
}

// Equal parts are one reduce-scatter, others a reduce each; half the bytes of all-reduces.
TEST_F(NcclExchangeTest, PartsOfNodesAreAddedWhereTheyBelong) {
  static std::atomic<int> all_reduces, scatters, reduces;
  Start(2, 2);
  nccl::Table table = fake_nccl::Table();
  table.AllReduce = [](const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                       ncclComm_t comm, cudaStream_t stream) {
    ++all_reduces;
    return fake_nccl::Table().AllReduce(send, receive, count, dtype, op, comm, stream);
  };
  table.ReduceScatter = [](const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    ++scatters;
    return fake_nccl::Table().ReduceScatter(send, receive, count, dtype, op, comm, stream);
  };
  table.Reduce = [](const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclRedOp_t op, int root,
                    ncclComm_t comm, cudaStream_t stream) {
    ++reduces;
    return fake_nccl::Table().Reduce(send, receive, count, dtype, op, root, comm, stream);
  };
  for (int node = 0; node < 2; ++node) {
    End(node);
    daemon(node).table = table;
    Make(node);
  }
  BeginOnAll(1);
  constexpr int64_t kNumel = 40'000;
  for (const int64_t first : {kNumel / 2, int64_t{7}}) {
    const uint64_t sequence = first == 7 ? 1 : 0;
    std::vector<std::shared_ptr<Pending>> all;
    for (int node = 0; node < 2; ++node) {
      auto pending = all.emplace_back(std::make_shared<Pending>());
      std::vector<NodePart> parts;
      for (int rank = 0; rank < 2; ++rank) {
        auto* const data = static_cast<float*>(gpus_.memory()->allocate(kNumel * 4, 64));
        FillNodeValues(node, rank, sequence, data, kNumel);
        pending->data.push_back(data);
        parts.push_back({rank, data, first, 0});
        parts.push_back({rank, data + first, kNumel - first, 1});
      }
      daemon(node).exchange->ReduceScatter(1, sequence, std::move(parts), "sum", [pending](absl::Status status) {
        pending->status = std::move(status);
        pending->done.Notify();
      });
    }
    for (const auto& pending : all) ASSERT_TRUE(Await(pending).ok()) << pending->status;
    for (size_t rank = 0; rank < 2; ++rank) {
      float* const sums = all[0]->data[rank];
      std::memcpy(sums + first, all[1]->data[rank] + first, static_cast<size_t>(kNumel - first) * 4);
      EXPECT_EQ(WrongNodeSums(2, static_cast<int>(rank), sequence, sums, kNumel), 0);
    }
  }
  EXPECT_EQ(all_reduces, 0);
  EXPECT_EQ(scatters, 4) << "of each rank on each node";
  EXPECT_EQ(reduces, 8);
}

// The nodes with one place in their rows all have the sums of its parts.
class NcclExchangeRowsTest : public NcclExchangeTest, public ::testing::WithParamInterface<std::pair<int, int>> {
 protected:
  // Of one rank of each node, for places behind one another in `begins`.
  std::vector<float*> Scatter(uint64_t sequence, const std::vector<int64_t>& numels,
                              const std::vector<int64_t>& begins) {
    std::vector<std::shared_ptr<Pending>> all;
    for (int node = 0; node < nodes(); ++node) {
      auto pending = all.emplace_back(std::make_shared<Pending>());
      auto* const data = static_cast<float*>(gpus_.memory()->allocate(static_cast<size_t>(begins.back()) * 4, 64));
      FillNodeValues(node, 0, sequence, data, begins.back());
      pending->data.push_back(data);
      std::vector<NodePart> parts;
      for (int place = 0; place < row_nodes_; ++place) {
        const auto at = static_cast<size_t>(place);
        if (numels[at] > 0) parts.push_back({0, data + begins[at], numels[at], place});
      }
      daemon(node).exchange->ReduceScatter(1, sequence, std::move(parts), "sum", [pending](absl::Status status) {
        pending->status = std::move(status);
        pending->done.Notify();
      });
    }
    std::vector<float*> data;
    for (const auto& pending : all) {
      EXPECT_TRUE(Await(pending).ok()) << pending->status;
      data.push_back(pending->data[0]);
    }
    return data;
  }
};

INSTANTIATE_TEST_SUITE_P(Nodes, NcclExchangeRowsTest,
                         ::testing::Values(std::pair(4, 2), std::pair(6, 3), std::pair(6, 2)), [](const auto& info) {
                           return absl::StrCat(info.param.first, "InRowsOf", info.param.second);
                         });

TEST_P(NcclExchangeRowsTest, NodesWithOnePlaceHaveTheSameSums) {
  moves_ = true;
  row_nodes_ = GetParam().second;
  Start(/*nodes=*/GetParam().first, /*ranks=*/1);
  // Whole pieces, fewer elements than there are rows, and none.
  const std::vector<int64_t> of_sums[] = {{1000, 16, 300'000}, {1, 17, 64}, {0, 5, 33}, {40'000, 0, 1}};
  for (uint64_t sequence = 0; sequence < 4; ++sequence) {
    const std::vector<int64_t>& numels = of_sums[sequence];
    std::vector<int64_t> begins = {0};
    for (const int64_t numel : numels) begins.push_back(begins.back() + (numel + 15) / 16 * 16);
    const std::vector<float*> data = Scatter(sequence, numels, begins);
    ASSERT_FALSE(HasFailure());
    for (int place = 0; place < row_nodes_; ++place) {
      const auto at = static_cast<size_t>(place);
      const float* const first = data[at] + begins[at];
      for (size_t node = at; node < data.size(); node += static_cast<size_t>(row_nodes_)) {
        EXPECT_EQ(std::memcmp(data[node] + begins[at], first, static_cast<size_t>(numels[at]) * 4), 0)
            << "node " << node << ", sum " << sequence;
      }
      for (int64_t i = 0; i < numels[at]; ++i) {
        double want = 0;
        for (int node = 0; node < nodes(); ++node) want += NodeValue(node, 0, sequence, begins[at] + i);
        ASSERT_NEAR(first[i], want, nodes() * 0x1p-23) << "place " << place << ", element " << i;
      }
    }
  }
}

class NcclExchangeFailureTest : public NcclExchangeTest {
 protected:
  // `node`'s library is `table`; what it fails once, it does not in the next generation.
  void StartWith(int node, const nccl::Table& table) {
    g_fail = true;
    Start(/*nodes=*/2, /*ranks=*/2);
    End(node);
    daemon(node).table = table;
    Make(node);
    BeginOnAll(1);
  }
  void ExpectTheNextGenerationSums() {
    g_fail = false;
    BeginOnAll(2);
    ExpectSums(2, 0);
    ExpectSums(2, 1);
  }
};

TEST_F(NcclExchangeFailureTest, ARefusedSumEndsTheGenerationsOtherSumsToo) {
  nccl::Table table = fake_nccl::Table();
  table.AllReduce = [](const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                       ncclComm_t comm, cudaStream_t stream) {
    return g_fail ? ncclUnhandledCudaError
                  : fake_nccl::Table().AllReduce(send, receive, count, dtype, op, comm, stream);
  };
  StartWith(1, table);
  const auto all = SumOnAll(1, 0);
  EXPECT_FALSE(Await(all[1]).ok());
  EXPECT_THAT(std::string(all[1]->status.message()), HasSubstr("unhandled cuda error (result 1)"));
  // Node 0 has no Begin yet: it is NCCL that notices that a member has gone.
  EXPECT_EQ(Await(all[0]).code(), absl::StatusCode::kUnavailable) << all[0]->status;
  EXPECT_THAT(std::string(all[0]->status.message()), HasSubstr("Connection closed by remote peer"));
  for (int node = 0; node < 2; ++node) {
    EXPECT_EQ(Await(Sum(node, 1, 1)).code(), all[static_cast<size_t>(node)]->status.code()) << "the same reason";
  }
  EXPECT_THAT(daemon(1).exchange->Describe(), HasSubstr("not in this generation, "));
  ExpectTheNextGenerationSums();
}

TEST_F(NcclExchangeFailureTest, AFailedCommunicatorIsMadeInTheNextGeneration) {
  nccl::Table table = fake_nccl::Table();
  table.CommInitRankConfig = [](ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
    return g_fail ? ncclSystemError : fake_nccl::Table().CommInitRankConfig(comm, ranks, id, rank, config);
  };
  StartWith(1, table);
  const auto all = SumOnAll(1, 0);
  EXPECT_EQ(Await(all[1]).code(), absl::StatusCode::kInternal) << all[1]->status;
  EXPECT_THAT(std::string(all[1]->status.message()), HasSubstr("ncclCommInitRankConfig cuda:2"));
  EXPECT_FALSE(all[0]->done.HasBeenNotified());
  daemon(0).exchange->Begin(2);
  EXPECT_EQ(Await(all[0]).code(), absl::StatusCode::kAborted);
  ExpectTheNextGenerationSums();
}

TEST_F(NcclExchangeFailureTest, AFailedIdIsNode0sErrorAndAbortsTheOthers) {
  nccl::Table table = fake_nccl::Table();
  table.GetUniqueId = [](ncclUniqueId* id) { return g_fail ? ncclSystemError : fake_nccl::Table().GetUniqueId(id); };
  StartWith(0, table);
  const auto all = SumOnAll(1, 0);
  EXPECT_EQ(Await(all[0]).code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(all[0]->status.message()), HasSubstr("ncclGetUniqueId"));
  EXPECT_FALSE(all[1]->done.HasBeenNotified());
  daemon(1).exchange->Begin(2);
  EXPECT_EQ(Await(all[1]).code(), absl::StatusCode::kAborted);
  ExpectTheNextGenerationSums();
}

TEST_F(NcclExchangeFailureTest, ADeviceThatTakesNoWorkReleasesItsNodesRanks) {
  StartWith(1, fake_nccl::Table());
  ExpectSums(1, 0);
  daemon(1).devices[0]->FailWith(absl::UnavailableError("no work today"));
  const auto all = SumOnAll(1, 1);
  EXPECT_EQ(Await(all[1]).code(), absl::StatusCode::kUnavailable) << all[1]->status;
  EXPECT_THAT(std::string(all[1]->status.message()), HasSubstr("no work today"));
  daemon(1).devices[0]->FailWith(absl::OkStatus());
  ExpectTheNextGenerationSums();
}

TEST_F(NcclExchangeTest, TheEndOfAnExchangeEndsAllItsSums) {
  Start(/*nodes=*/2, /*ranks=*/2);
  BeginOnAll(1);
  ExpectSums(1, 0);
  const auto under_way = Sum(0, 1, 1);
  const auto waiting = Sum(0, 1, 3);
  End(0);
  EXPECT_TRUE(under_way->done.HasBeenNotified() && waiting->done.HasBeenNotified());
  EXPECT_EQ(under_way->status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(waiting->status.code(), absl::StatusCode::kAborted);
}

TEST_F(NcclExchangeTest, RanksThatShareAGpuHaveACommunicatorEach) {
  Start(/*nodes=*/2, /*ranks=*/3, /*gpus_of_each=*/1);
  BeginOnAll(1);
  std::vector<std::vector<std::shared_ptr<Pending>>> sums;
  for (uint64_t sequence = 0; sequence < 10; ++sequence) sums.push_back(SumOnAll(1, sequence));
  for (uint64_t sequence = 0; sequence < 10; ++sequence) ExpectSums(sums[sequence], sequence);
}

TEST_F(NcclExchangeTest, SumsAndRanksAreIssuedInOrderHoweverTheyCome) {
  Start(/*nodes=*/2, /*ranks=*/2, /*gpus_of_each=*/1);
  BeginOnAll(1);
  ExpectSums(1, 0);
  std::vector<std::vector<std::shared_ptr<Pending>>> sums(4);
  for (int node = 0; node < 2; ++node) sums[3].push_back(Sum(node, 1, 3));
  absl::SleepFor(absl::Milliseconds(50));
  for (const auto& pending : sums[3]) EXPECT_FALSE(pending->done.HasBeenNotified()) << "others come before it";
  for (const uint64_t sequence : {2, 1}) sums[sequence].push_back(Sum(0, 1, sequence));
  for (const uint64_t sequence : {1, 2}) sums[sequence].push_back(Sum(1, 1, sequence));
  for (uint64_t sequence = 1; sequence < 4; ++sequence) ExpectSums(sums[sequence], sequence);
  for (int node = 0; node < 2; ++node) {
    std::vector<std::string> labels;
    std::vector<int> members;
    for (const auto& record : daemon(node).devices[0]->records()) {
      EXPECT_EQ(record.stream, StreamId::kPostBackward);
      labels.push_back(record.label);
      ASSERT_EQ(record.ops.size(), 1u);
      members.push_back(std::get<SumOp>(record.ops[0]).member);
    }
    EXPECT_THAT(labels, ::testing::ElementsAre("sum 0", "sum 0", "sum 1", "sum 1", "sum 2", "sum 2", "sum 3", "sum 3"));
    EXPECT_THAT(members, ::testing::Each(node));
  }
}

TEST_F(NcclExchangeTest, WhatDoesNotFitIsRefusedAndHarmsNothing) {
  Start(/*nodes=*/2, /*ranks=*/1);
  BeginOnAll(3);
  EXPECT_EQ(Await(Sum(0, 2, 0)).code(), absl::StatusCode::kAborted);
  const auto refused = [&](std::vector<NodePart> parts) {
    auto pending = std::make_shared<Pending>();
    daemon(0).exchange->AllReduce(3, 0, std::move(parts), "sum", [pending](absl::Status status) {
      pending->status = std::move(status);
      pending->done.Notify();
    });
    return Await(pending);
  };
  float data = 0;
  for (const NodePart& part :
       {NodePart{1, &data, 1}, NodePart{-1, &data, 1}, NodePart{0, nullptr, 1}, NodePart{0, &data, 0}}) {
    EXPECT_EQ(refused({part}).code(), absl::StatusCode::kInvalidArgument);
  }
  // Neither from who is none, nor for who is not asked, nor of another time.
  v1::PeerMessage::Exchange message;
  message.set_generation(3);
  for (const int node : {-1, 0, 2}) daemon(0).exchange->OnMessage(node, message);
  message.set_generation(2);
  message.add_nccl_ids("old");
  daemon(1).exchange->OnMessage(0, message);
  ExpectSums(3, 0);
  EXPECT_EQ(Await(Sum(0, 3, 0)).code(), absl::StatusCode::kInvalidArgument) << "it has been";
  ExpectSums(3, 1);
}

TEST_F(NcclExchangeTest, IdsThatAreMalformedAreAnErrorOfTheGeneration) {
  Start(/*nodes=*/2, /*ranks=*/2);
  uint64_t generation = 0;
  for (const auto& [ids, text] : std::vector<std::pair<std::vector<size_t>, const char*>>{
           {{128, 5}, "an id of NCCL's is malformed (got 5 bytes, want 128)"},
           {{128}, "nodes have other numbers of ranks (got 1 ids, want 2)"},
           {{}, "communicators broke as they were to be used (got those of attempt 0, want 9)"}}) {
    BeginOnAll(++generation);
    v1::PeerMessage::Exchange message;
    message.set_generation(generation);
    message.set_attempt(9);
    for (const size_t bytes : ids) message.add_nccl_ids(std::string(bytes, 'x'));
    daemon(1).exchange->OnMessage(0, message);
    EXPECT_THAT(std::string(Await(Sum(1, generation, 0)).message()), HasSubstr(text));
  }
  BeginOnAll(++generation);
  ExpectSums(generation, 0);
}

TEST_F(NcclExchangeTest, TwoJobsHaveTheDaemonsGpusAndNoThird) {
  Start(/*nodes=*/1, /*ranks=*/2);
  NcclExchanges exchanges(NcclLibrary(fake_nccl::Table(), 22809), gpus_.driver(), {4, 5});
  const std::vector<Device*> devices = {devices_[4].get(), devices_[5].get(), devices_[4].get()};
  NcclExchangeOptions options;
  options.devices = devices;
  options.send = [](int, v1::PeerMessage) {};
  options.addresses = {"one:1", "two:1"};
  auto first = exchanges.Make("first", options);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_THAT((*first)->Describe(), HasSubstr("members here cuda:4, cuda:5, cuda:4"));
  NcclExchangeOptions elsewhere = options;
  elsewhere.addresses = {"one:1", "three:1"};
  const absl::Status other = exchanges.Make("second", elsewhere).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(other.message()), HasSubstr("must have the same nodes in the same order"));
  const auto second = exchanges.Make("second", options);
  ASSERT_TRUE(second.ok()) << second.status();
  const absl::Status third = exchanges.Make("third", options).status();
  EXPECT_EQ(third.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(third.message()), HasSubstr("(there: \"first\" and \"second\")"));
  first->reset();
  EXPECT_TRUE(exchanges.Make("third", options).ok());
}

}  // namespace
}  // namespace shardd
