// A job over three nodes of one rank each, whose node 0 loses its daemon.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/match.h"
#include "tests/server/job/job_nodes_fixture.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class JobNode0Test : public JobNodesTest {
 protected:
  JobNode0Test() : JobNodesTest(3) {}
  bool HasEvent(const std::string& text) {
    for (const v1::Event& event : events_.List("", 1000)) {
      if (absl::StrContains(event.text(), text)) return true;
    }
    return false;
  }
  bool IsCommitting(int node) {
    v1::Job described;
    job(node).view().Describe(&described).Complete(&described);
    return described.state() == v1::JOB_STATE_COMMITTING;
  }
  // The step behind `step` is decided, and nodes `first` to `last` do not hear of it: no rank of any node does.
  void DecidesUnheardBy(int64_t step, int first, int last) {
    wire_.Drop([first, last](int to, const v1::PeerMessage& message) {
      return message.has_decided() && to >= first && to <= last;
    });
    TrainAll();
    for (int node = 0; node < count(); ++node) {
      if (node < first || node > last) {
        EXPECT_TRUE(Until([&] { return IsCommitting(node); })) << Why(node);
      }
    }
    for (int node = 0; node < count(); ++node) {
      OnLoop([&] {
        EXPECT_NE(job(node).sessions()[0].get(), nullptr) << node;
        EXPECT_EQ(job(node).view().committed_step(), step) << "node " << node;
      });
    }
    wire_.Drop(nullptr);
  }
  // Step 2: node 0, whose daemon is lost, had decided it.
  void Node2GivesAStepUpThatNode1Has() {
    Begin();
    TrainsTo(1);
    DecidesUnheardBy(1, 2, 2);
    Kill(0);
    OnLoop([&] { job(2).CheckSilence(MonotonicNow() + absl::Hours(1)); });
    ASSERT_TRUE(Gone(2));
  }
  void AttachAll() {
    for (int node = 0; node < count(); ++node) {
      ASSERT_TRUE(Until([&] { return job(node).committed().version() > 0; })) << "node " << node << " has no state";
    }
    for (int node = 0; node < count(); ++node) {
      bool attached = false;
      OnLoop([&] { attached = job(node).sessions()[0].get() != nullptr; });
      if (!attached) Attach(node);
    }
  }
};

TEST_F(JobNode0Test, ItsStateComesFromAnotherAndTheJobGoesOn) {
  Begin();
  for (int64_t step = 1; step <= 3; ++step) TrainsTo(step);
  Kill(0);
  for (int node = 1; node < 3; ++node) {
    ASSERT_TRUE(Gone(node));
    EXPECT_THAT(Why(node), HasSubstr("node 0 (host0:7000) is lost: the link broke"));
  }
  OpenAgain(0);
  AttachAll();
  OnLoop([&] {
    EXPECT_EQ(job(0).view().committed_step(), 3);
    EXPECT_EQ(job(0).committed().version(), job(1).committed().version());
  });
  EXPECT_TRUE(HasEvent("step 3 came from node 1"));
  for (int64_t step = 4; step <= 5; ++step) TrainsTo(step);
}

TEST_F(JobNode0Test, AStepThatNobodyElseHeardOfIsDoneAnew) {
  Begin();
  TrainsTo(1);
  DecidesUnheardBy(1, 1, 2);
  Kill(0);
  OpenAgain(0);
  AttachAll();
  for (int node = 0; node < 3; ++node) IsAt(node, 1);
  GoesOnTo(2);
}

TEST_F(JobNode0Test, AnUnacknowledgedStepIsVisibleToNobodyAndBlocksAttaching) {
  Begin();
  TrainsTo(1);
  DecidesUnheardBy(1, 1, 2);
  wire_.SetUp(0, 1, false);
  ASSERT_TRUE(Gone(0));
  EXPECT_EQ(StreamOf(0).Aborted().committed_step(), 1);
  EXPECT_THAT(std::string(TryAttach(0).message()),
              AllOf(HasSubstr("step 2 is decided, and not shown before all nodes hold it"),
                    HasSubstr("node 1 (host1:7000), which has no link,"), HasSubstr("attach again")));
  wire_.SetUp(0, 1, true);  // which tells node 1, and not node 2
  OnLoop([&] { EXPECT_EQ(job(0).view().committed_step(), 1); });
  wire_.SetUp(0, 2, false);
  wire_.SetUp(0, 2, true);
  for (int node = 0; node < 3; ++node) IsAt(node, 2);
  AttachAll();
  GoesOnTo(3);
}

TEST_F(JobNode0Test, ALostAcknowledgementIsSentOnTheNextLink) {
  Begin();
  TrainsTo(1);
  wire_.Drop([](int, const v1::PeerMessage& message) { return message.has_held(); });
  TrainAll();
  for (int node = 0; node < 3; ++node) {
    EXPECT_TRUE(Until([&] { return IsCommitting(node); })) << Why(node);
    EXPECT_EQ(job(node).view().committed_step(), 1);
  }
  wire_.Drop(nullptr);
  for (int node = 1; node < 3; ++node) {
    wire_.SetUp(0, node, false);
    wire_.SetUp(0, node, true);
  }
  for (int node = 0; node < 3; ++node) IsAt(node, 2);
  AttachAll();
  GoesOnTo(3);
}

TEST_F(JobNode0Test, LostNodesAreSentTheStepBeforeAllSeeIt) {
  Begin();
  TrainsTo(1);
  DecidesUnheardBy(1, 2, 2);
  Kill(2);
  OpenAgain(2);
  for (int node = 0; node < 3; ++node) IsAt(node, 2);
  EXPECT_TRUE(HasEvent("step 2 is sent to node 2"));
  AttachAll();
  GoesOnTo(3);
}

TEST_F(JobNode0Test, AStepOneNodeHeardOfIsCommittedByAll) {
  Begin();
  TrainsTo(1);
  DecidesUnheardBy(1, 2, 2);
  Kill(0);
  EXPECT_NE(job(2).sessions()[0].get(), nullptr) << "it has promised";
  OpenAgain(0);
  IsAt(2, 2);
  AttachAll();
  for (int node = 0; node < 3; ++node) IsAt(node, 2);
  EXPECT_FALSE(HasEvent("is sent to node 2")) << "its own gradients were enough";
  GoesOnTo(3);
}

TEST_F(JobNode0Test, AlsoWhereTheRankThatPromisedHasDied) {
  Begin();
  DecidesUnheardBy(0, 2, 2);
  Kill(0);
  Lose(2);
  EXPECT_FALSE(TryAttach(2).ok());
  OpenAgain(0);
  // The death ends the attempt behind the step, on all nodes: who attaches before that has to come again.
  ASSERT_TRUE(Until([&] { return job(0).committed().epoch() == 3 && job(1).committed().epoch() == 3; }));
  AttachAll();
  for (int node = 0; node < 3; ++node) IsAt(node, 1);
  GoesOnTo(2);
}

TEST_F(JobNode0Test, AnOverlongPromiseEndsAndTheNodeGetsTheStep) {
  ASSERT_NO_FATAL_FAILURE(Node2GivesAStepUpThatNode1Has());
  EXPECT_THAT(Why(2), AllOf(HasSubstr("node 0 (host0:7000) has not been reached"), HasSubstr("limit")));
  EXPECT_FALSE(job(2).closed());
  OpenAgain(0);
  AttachAll();
  for (int node = 0; node < 3; ++node) IsAt(node, 2);
  EXPECT_TRUE(HasEvent("is sent to node 2"));
  GoesOnTo(3);
}

// They have what they had, and it comes: they are not to give up.
TEST_F(JobNode0Test, RanksOfANodeAwaitingStateAreToldToReattach) {
  ASSERT_NO_FATAL_FAILURE(Node2GivesAStepUpThatNode1Has());
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_state() && to == 2; });
  OpenAgain(0);
  ASSERT_TRUE(Until([&] { return job(2).committed().version() == 0; }));
  OnLoop([&] { EXPECT_TRUE(job(2).view().has_parameters()); });
  const absl::Status status = TryAttach(2);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("is being brought from node 0 (host0:7000); attach again"));
  wire_.Drop(nullptr);
  wire_.SetUp(0, 2, false);
  wire_.SetUp(0, 2, true);
  AttachAll();
  for (int node = 0; node < 3; ++node) IsAt(node, 2);
  GoesOnTo(3);
}

// Who comes first to the place that a lost daemon has left is not to end what others train.
TEST_F(JobNode0Test, AnotherUsersJobInItsPlaceEndsNothing) {
  Begin();
  TrainsTo(1);
  Kill(0);
  for (int node = 1; node < 3; ++node) {
    wire_.Refuse(node, 0, absl::PermissionDeniedError("the name is taken by a job of another user"));
    OnLoop([&] { EXPECT_FALSE(job(node).closed()); });
  }
  OpenAgain(0);
  AttachAll();
  for (int node = 0; node < 3; ++node) IsAt(node, 1);
  GoesOnTo(2);
}

TEST_F(JobNode0Test, AnotherUsersJobOfTheNameEndsAnEmptyOne) {
  wire_.Refuse(1, 0, absl::PermissionDeniedError("the name is taken by a job of another user"));
  EXPECT_TRUE(Until([&] { return job(1).closed(); }));
}

TEST_F(JobNode0Test, BothOfTwoEmptyNodesAreSentTheState) {
  Begin();
  TrainsTo(1);
  Kill(0);
  Kill(1);
  OpenAgain(1);
  Attach(1);
  CommitParameters(1);  // it begins, as it believes
  OpenAgain(0);
  AttachAll();
  EXPECT_TRUE(HasEvent("step 1 came from node 2"));
  EXPECT_TRUE(HasEvent("step 1 came from node 0"));
  for (int node = 0; node < 3; ++node) IsAt(node, 1);
  GoesOnTo(2);
}

TEST_F(JobNode0Test, NobodyAttachesToItBeforeAllHaveBeenHeard) {
  Begin();
  TrainsTo(1);
  Kill(0);
  Open(0);
  wire_.SetUp(0, 1, true);
  for (int i = 0; i < 3; ++i) {  // until node 1 has said what it has
    OnLoop([] {});
    wire_.Drop(nullptr);
  }
  OnLoop([] {});
  EXPECT_THAT(std::string(TryAttach(0).message()),
              AllOf(HasSubstr("node 2 (host2:7000), which has no link,"), HasSubstr("step 1 of node 1")));
  EXPECT_EQ(job(0).committed().version(), 0u);
  wire_.SetUp(0, 2, true);
  AttachAll();
  for (int node = 0; node < 3; ++node) IsAt(node, 1);
  GoesOnTo(2);
}

TEST_F(JobNode0Test, IfNobodyHasTheStateAllBeginAnewFromNothing) {
  Begin();
  for (int64_t step = 1; step <= 2; ++step) TrainsTo(step);
  Kill(0);
  Kill(1);
  OpenAgain(1);
  wire_.Drop([](int, const v1::PeerMessage& message) { return message.has_state(); });
  OpenAgain(0);
  ASSERT_TRUE(Until([&] { return *SlabAt<float>(job(0).memory().shards(), 0) == -2; }));
  Kill(2);
  wire_.Drop(nullptr);
  OpenAgain(2);
  Begin();
  for (int node = 0; node < 3; ++node) IsAt(node, 0);
  TrainsTo(1);
}

TEST_F(JobNode0Test, AJobClosedMeanwhileIsClosedOnAllPresentNodes) {
  Begin();
  TrainsTo(1);
  Kill(0);
  OnLoop([&] { job(1).Close("closed by pid 1", JobCore::CloseOn::kAllNodes); });
  EXPECT_TRUE(Until([&] { return job(2).closed(); }));
}

}  // namespace
}  // namespace shardd
