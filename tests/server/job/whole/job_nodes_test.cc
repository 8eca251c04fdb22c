// Jobs over two nodes, whole in each of them.

#include "absl/synchronization/notification.h"
#include "tests/server/job/job_nodes_fixture.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

TEST_F(JobNodesTest, StepsAreTheMeanOfBothNodes) {
  Begin();
  for (int64_t step = 1; step <= 3; ++step) TrainsTo(step);
}

// They would be of bytes that may be taken back, and then the node would be no replica with the next step.
TEST_F(JobNodesTest, NobodyWritesWhileDigestsAreTaken) {
  Begin();
  TrainsTo(1);
  absl::Notification go;
  worker_.Post([&] { go.WaitForNotification(); });
  TrainsTo(2);  // behind which nodes compare
  v1::Command command;
  command.mutable_enter_full_params()->set_writeback(true);
  for (int node = 0; node < 2; ++node) Send(node, command);
  for (int node = 0; node < 2; ++node) EXPECT_EQ(StreamOf(node).FullParams().number(), 0u) << node;
  go.Notify();
  for (int node = 0; node < 2; ++node) {
    EXPECT_TRUE(testing::PollUntil([&] { return StreamOf(node).FullParams().number() == 1; }, kPatience)) << node;
  }
}

TEST_F(JobNodesTest, AParameterThatDiffersIsNamedWithTheNextStep) {
  Begin();
  TrainsTo(1);
  OnLoop([&] { SlabAt<float>(job(1).memory().shards(), 0)[7] += 1; });  // a bit of its memory fell over
  TrainsTo(2);                                                          // behind which nodes compare
  TrainAll();
  ASSERT_TRUE(Gone(0) && Gone(1));
  for (int node = 0; node < 2; ++node) {
    EXPECT_THAT(Why(node), HasSubstr("Step 3: node 1 (host1:7000) is no replica of node 0"));
    EXPECT_THAT(Why(node), HasSubstr("\"w\" of group"));
    EXPECT_THAT(Why(node), HasSubstr("behind step 2"));
    EXPECT_EQ(job(node).view().committed_step(), 2);
  }
}

TEST_F(JobNodesTest, ReplicasThatAreTheSameAreComparedAndTrainOn) {
  Begin();
  for (int64_t step = 1; step <= 7; ++step) TrainsTo(step);
}

TEST_F(JobNodesTest, ANodeThatAwaitsALostRankIsToldWhy) {
  Begin();
  TrainsTo(1);
  Train(0, 1);
  Lose(1);
  ASSERT_TRUE(Gone(0));
  EXPECT_THAT(Why(0), HasSubstr("node 1 (host1:7000): "));
  EXPECT_THAT(Why(0), HasSubstr("killed"));
  for (int node = 0; node < 2; ++node) Attach(node);
  TrainsTo(2);
}

TEST_F(JobNodesTest, ABrokenLinkOnlyEndsTheGenerationOnBothNodes) {
  Begin();
  TrainsTo(1);
  Train(1, 3);
  wire_.SetUp(false);
  ASSERT_TRUE(Gone(0) && Gone(1));
  EXPECT_THAT(Why(0), HasSubstr("node 1 (host1:7000) is lost: the link broke"));
  EXPECT_THAT(Why(1), HasSubstr("node 0 (host0:7000) is lost: the link broke"));
  for (int node = 0; node < 2; ++node) Attach(node);
  Train(0, 1);  // before there is a link
  wire_.SetUp(true);
  Train(1, 3);
  for (int node = 0; node < 2; ++node) {
    EXPECT_TRUE(Until([&] { return job(node).view().committed_step() == 2; })) << node << Why(node);
  }
  TrainsTo(3);
}

TEST_F(JobNodesTest, NobodyAttachesWhileOldInitialValuesAreStillBeingRead) {
  absl::Notification go_on;
  worker_.Post([&] { go_on.WaitForNotification(); });
  for (int node = 0; node < 2; ++node) {
    Attach(node);
    CommitParameters(node);
  }
  Lose(0);
  ASSERT_TRUE(Gone(1));
  for (int node = 0; node < 2; ++node) {
    EXPECT_THAT(std::string(TryAttach(node).message()), HasSubstr("are still being read; attach again"));
  }
  go_on.Notify();
  Begin();
  TrainsTo(1);
}

TEST_F(JobNodesTest, AbandoningAContributedBackwardRestartsTheStepOnBothNodes) {
  Begin();
  Submit(0, 10);
  v1::Command command;
  command.mutable_abandon_backward();
  Send(0, command);
  ASSERT_TRUE(Gone(0) && Gone(1));
  EXPECT_THAT(Why(1), HasSubstr("node 0 (host0:7000): "));
  EXPECT_THAT(Why(1), HasSubstr("were given to other nodes"));
  for (int node = 0; node < 2; ++node) Attach(node);
  TrainsTo(1);
}

TEST_F(JobNodesTest, AFinishedNodeLeavesTheOtherItsLastStep) {
  Begin();
  TrainsTo(1);
  const uint64_t epoch = job(1).committed().epoch();
  OnLoop([&] { job(0).Detach(0, /*finished=*/true); });
  ASSERT_TRUE(Until([&] { return job(0).nodes().finished(); }));
  OnLoop([&] { job(0).Close("all its ranks have finished"); });
  wire_.SetUp(false);
  EXPECT_EQ(job(1).committed().epoch(), epoch) << "nobody was troubled";
  OnLoop([&] { job(1).Detach(0, /*finished=*/true); });
  EXPECT_TRUE(Until([&] { return job(1).nodes().finished(); })) << Why(1);
  EXPECT_EQ(job(1).view().committed_step(), 1);
}

// It has shown its last step and is done; the other holds that and has not heard that it may show it.
TEST_F(JobNodesTest, Node0IsNotFinishedBeforeOthersKnowTheLastStep) {
  Begin();
  TrainsTo(1);
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_all_hold() && to == 1; });
  TrainAll();
  IsAt(0, 2);
  OnLoop([&] { job(0).Detach(0, /*finished=*/true); });
  wire_.SetUp(false);
  wire_.Drop(nullptr);
  OnLoop([&] {
    EXPECT_FALSE(job(0).nodes().finished());
    EXPECT_EQ(job(1).view().committed_step(), 1);
  });
  wire_.SetUp(true);
  IsAt(1, 2);
  EXPECT_TRUE(Until([&] { return job(0).nodes().finished(); }));
}

TEST_F(JobNodesTest, WorkBegunWithAFinishingNode0ComesToAnEnd) {
  Begin();
  TrainsTo(1);
  wire_.Drop(
      [](int to, const v1::PeerMessage& message) { return to == 0 && (message.has_ready() || message.has_closed()); });
  Train(1, 3);
  OnLoop([] {});
  OnLoop([&] { job(0).Detach(0, /*finished=*/true); });
  ASSERT_TRUE(Until([&] { return job(0).nodes().finished(); }));
  OnLoop([&] { job(0).Close("all its ranks have finished"); });
  OnLoop([] {});
  wire_.SetUp(false);
  ASSERT_TRUE(Gone(1));
  EXPECT_THAT(Why(1), HasSubstr("node 0 (host0:7000) has finished and takes part in nothing any more"));
}

class JobNodesSchedules : public JobNodesTest, public ::testing::WithParamInterface<int> {};

TEST_P(JobNodesSchedules, RanksAndLinksThatComeAndGoLoseNothing) { RunSchedule(GetParam()); }
INSTANTIATE_TEST_SUITE_P(Seeds, JobNodesSchedules, ::testing::Range(0, 8));

}  // namespace
}  // namespace shardd
