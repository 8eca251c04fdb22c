// Jobs over four nodes in two rows: each row has one copy, of which each of its nodes has half.

#include <cstring>

#include "tests/server/job/job_nodes_fixture.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class JobRowsTest : public JobNodesTest {
 protected:
  explicit JobRowsTest(v1::Strategy strategy = v1::STRATEGY_HYBRID_SHARD, bool outlives = false)
      : JobNodesTest(4, strategy, outlives, /*in_trainers=*/false, /*edits=*/false, /*frozen=*/false,
                     /*several=*/false, /*describe=*/nullptr, /*row=*/2) {}

  // Whole, as every node's ranks may; a node keeps its half.
  void BeginWith(float value) {
    for (int node = 0; node < count(); ++node) {
      Attach(node);
      WriteWhole(node, value);
      CommitParameters(node);
    }
    for (int node = 0; node < count(); ++node) {
      ASSERT_TRUE(Until([&] { return job(node).committed().version() == 1; })) << Why(node);
    }
  }
  // Its whole model, gathered.
  std::vector<float> Model(int node) {
    v1::Command command;
    command.mutable_unshard()->set_phase(v1::PHASE_FORWARD);
    Send(node, command);
    EXPECT_TRUE(Until([&] {
      const Session* session = job(node).sessions()[0].get();
      return session != nullptr && session->handles[0].storage() == StorageState::kUnsharded;
    })) << Why(node);
    const float* const pool = SlabAt<float>(job(node).memory().pool(), 0);
    std::vector<float> model(pool, pool + 64);
    command.mutable_reshard()->set_group(0);
    Send(node, command);
    return model;
  }
  // Gradients of which the order of addition shows.
  void TrainOdd(int step) {
    for (int node = 0; node < count(); ++node) {
      Train(node, 0.1f * static_cast<float>(node + 1) + 1e-3f * static_cast<float>(step) + 1e-7f / (1.0f + node));
    }
    for (int node = 0; node < count(); ++node) {
      ASSERT_TRUE(Until([&] { return job(node).view().committed_step() == step; })) << "node " << node << Why(node);
    }
  }
  std::string Held(int node) {
    return {reinterpret_cast<const char*>(SlabAt<float>(job(node).memory().shards(), 128 * (node % 2))), 128};
  }
};

TEST_F(JobRowsTest, EachNodeKeepsItsHalfAndIsGivenTheOtherOfItsRow) {
  BeginWith(100);
  for (int node = 0; node < 4; ++node) {
    EXPECT_EQ(SlabAt<float>(job(node).memory().shards(), 0)[32 * (node % 2)], 100 + 32 * (node % 2));
    EXPECT_EQ(SlabAt<float>(job(node).memory().shards(), 0)[32 * (1 - node % 2)], 0) << "is another node's";
    const std::vector<float> model = Model(node);
    for (int i = 0; i < 64; ++i) ASSERT_EQ(model[static_cast<size_t>(i)], 100 + i) << "node " << node;
  }
}

TEST_F(JobRowsTest, StepsAreTheMeanOfAllNodes) {
  Begin();
  for (int64_t step = 1; step <= 5; ++step) TrainsTo(step);
}

TEST_F(JobRowsTest, RowsHaveTheSameBits) {
  BeginWith(0.3f);
  for (int step = 1; step <= 6; ++step) TrainOdd(step);
  for (int node = 0; node < 2; ++node) EXPECT_EQ(Held(node), Held(node + 2)) << node;
  const std::vector<float> model = Model(0);
  for (int node = 1; node < 4; ++node) EXPECT_EQ(std::memcmp(Model(node).data(), model.data(), 256), 0) << node;
}

TEST_F(JobRowsTest, InitialValuesThatDifferBetweenRowsAreNamed) {
  for (int node = 0; node < 4; ++node) {
    Attach(node);
    WriteWhole(node, node == 3 ? 7 : 5);
    CommitParameters(node);
  }
  for (int node = 0; node < 4; ++node) {
    ASSERT_TRUE(Gone(node));
    EXPECT_THAT(Why(node), AllOf(HasSubstr("the initial value of \"w\" on node 3 (host3:7000)"),
                                 HasSubstr("differs from node 1's")));
  }
}

TEST_F(JobRowsTest, AParameterThatDiffersIsNamedWithTheNextStep) {
  Begin();
  TrainsTo(1);
  OnLoop([&] { SlabAt<float>(job(2).memory().shards(), 0)[7] += 1; });  // a bit of its memory fell over
  TrainsTo(2);                                                          // behind which nodes compare
  TrainAll();
  for (int node = 0; node < 4; ++node) {
    ASSERT_TRUE(Gone(node));
    EXPECT_THAT(Why(node), AllOf(HasSubstr("Step 3: node 2 (host2:7000) is no replica of node 0 (host0:7000)"),
                                 HasSubstr("\"w\" of group"), HasSubstr("behind step 2")));
    EXPECT_EQ(job(node).view().committed_step(), 2);
  }
}

TEST_F(JobRowsTest, ALostLinkBetweenRowsEndsTheAttemptOnAll) {
  Begin();
  TrainsTo(1);
  wire_.SetUp(1, 2, false);
  Train(0, GradientOf(0));
  Train(3, GradientOf(3));
  wire_.SetUp(1, 2, true);
  GoesOnTo(4);
}

// A node of the other row has what its ranks held, and does not send it yet.
TEST_F(JobRowsTest, ADaemonThatKeptNothingClosesTheJobByName) {
  Begin();
  TrainsTo(1);
  Kill(3);
  for (int node = 0; node < 3; ++node) {
    ASSERT_TRUE(Gone(node));
    Attach(node);
  }
  OpenAgain(3);
  for (int node = 0; node < 3; ++node) {
    ASSERT_TRUE(Until([&] { return job(node).closed(); })) << node;
    EXPECT_THAT(Why(node), AllOf(HasSubstr("the daemon of node 3 (host3:7000) has nothing of what other nodes have"),
                                 HasSubstr("is in another row of nodes, which does not send it")));
  }
}

class JobRowsSchedules : public JobRowsTest, public ::testing::WithParamInterface<int> {};

TEST_P(JobRowsSchedules, RanksAndLinksThatComeAndGoLoseNothing) { RunSchedule(GetParam(), 40); }
INSTANTIATE_TEST_SUITE_P(Seeds, JobRowsSchedules, ::testing::Range(2, 7));

}  // namespace
}  // namespace shardd
