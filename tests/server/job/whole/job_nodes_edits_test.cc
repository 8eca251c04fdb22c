// Ranks edit parameters in place over two nodes, beside the daemon's optimizer: what the daemons tell them where they
// enter a pass, and what becomes of what they write back.

#include <array>

#include "absl/time/clock.h"
#include "common/shm/page.h"
#include "tests/server/job/job_nodes_fixture.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class JobNodesEdits : public JobNodesTest {
 protected:
  explicit JobNodesEdits(v1::Strategy strategy = v1::STRATEGY_HYBRID_SHARD)
      : JobNodesTest(2, strategy, /*outlives=*/false, /*in_trainers=*/false, /*edits=*/true) {}

  void EnterPass(int node, bool has_edits = false) {
    v1::Command command;
    command.mutable_enter_pass()->set_has_edits(has_edits);
    Send(node, command);
  }
  void LeavePass(int node) {
    v1::Command command;
    command.mutable_leave_pass();
    Send(node, command);
  }
  void WriteBack(int node) {
    v1::Command command;
    command.mutable_enter_full_params()->set_writeback(true);
    Send(node, command);
  }
  void CommitEdits(int node) {
    v1::Command command;
    command.mutable_commit_parameters()->set_of_edits(true);
    Send(node, command);
  }
  void LeaveFullParams(int node) {
    v1::Command command;
    command.mutable_leave_full_params();
    Send(node, command);
  }
  uint64_t Word(int node, TimelineWord DaemonPage::*word) {
    uint64_t result = 0;
    OnLoop([&] {
      if (const Session* session = job(node).sessions()[0].get(); session != nullptr) {
        result = TimelineSequence((session->memory()->daemon_page->At<DaemonPage>(0)->*word).load());
      }
    });
    return result;
  }
  uint64_t Passes(int node) { return Word(node, &DaemonPage::passes); }
  uint64_t Told(int node) { return Word(node, &DaemonPage::hand_ins); }
  bool AllInside(uint64_t passes) {
    return testing::PollUntil([&] { return Passes(0) == passes && Passes(1) == passes; }, kPatience);
  }
  bool AllInFullParams() {
    return testing::PollUntil(
        [&] {
          return Word(0, &DaemonPage::full_params) > full_params_ && Word(1, &DaemonPage::full_params) > full_params_;
        },
        kPatience);
  }
  bool AllAt(uint64_t version) {
    return Until([&] { return job(0).committed().version() == version && job(1).committed().version() == version; });
  }
  // `node` alone has edited, or both.
  void WriteBackAll(float value, int node = -1) {
    for (int each = 0; each < 2; ++each) WriteBack(each);
    ASSERT_TRUE(AllInFullParams()) << Why(0) << Why(1);
    ++full_params_;
    for (int each = 0; each < 2; ++each) {
      if (node < 0 || node == each) WriteWhole(each, value);
    }
    for (int each = 0; each < 2; ++each) CommitEdits(each);
  }
  uint64_t full_params_ = 0;
};
class JobCutEdits : public JobNodesEdits {
 protected:
  JobCutEdits() : JobNodesEdits(v1::STRATEGY_FULL_SHARD) {}
};

TEST_F(JobNodesEdits, ReplicasWithoutEditsEnterPassesByThemselves) {
  Begin();
  EnterPass(0);
  EXPECT_TRUE(testing::PollUntil([&] { return Passes(0) == 1; }, kPatience));
  EXPECT_EQ(Passes(1) + Told(0), 0);
  LeavePass(0);
  EnterPass(1);
  EXPECT_TRUE(AllInside(1));
  LeavePass(1);
}

TEST_F(JobNodesEdits, ReplicasThatWriteTheSameBackHaveOneVersion) {
  Begin();
  for (int node = 0; node < 2; ++node) EnterPass(node, /*has_edits=*/true);
  ASSERT_TRUE(AllInside(1));
  EXPECT_EQ(Told(0) * 10 + Told(1), 11);
  for (int node = 0; node < 2; ++node) LeavePass(node);
  WriteBackAll(7);
  ASSERT_TRUE(AllAt(2)) << Why(0) << Why(1);
  for (int node = 0; node < 2; ++node) {
    EXPECT_EQ(Value(node), 7);
    LeaveFullParams(node);
    EnterPass(node);
  }
  ASSERT_TRUE(AllInside(2));
  EXPECT_EQ(Told(0) * 10 + Told(1), 11);
}

// It would wait for the other, which waits for its gradients.
TEST_F(JobNodesEdits, AReplicaThatComputesWhileAnotherWritesBackIsNamed) {
  Begin();
  EnterPass(0);
  EnterPass(1, /*has_edits=*/true);
  ASSERT_TRUE(AllInside(1));
  EXPECT_EQ(Told(0) * 10 + Told(1), 1);
  LeavePass(1);
  WriteBack(1);
  ASSERT_TRUE(testing::PollUntil([&] { return Word(1, &DaemonPage::full_params) == 1; }, kPatience));
  WriteWhole(1, 7);
  CommitEdits(1);
  Submit(0, 1);
  ASSERT_TRUE(Gone(0) && Gone(1));
  for (int node = 0; node < 2; ++node) {
    EXPECT_THAT(Why(node), AllOf(HasSubstr("on node 0"), HasSubstr("which they write, on node 1"))) << node;
  }
  for (int node = 0; node < 2; ++node) Attach(node);
  EXPECT_EQ(Value(1), 0) << "it is taken back";
}

TEST_F(JobNodesEdits, EditsAreNotHandedInOtherwise) {
  Begin();
  v1::Command command;
  command.mutable_hand_in();
  Send(0, command);
  ASSERT_TRUE(Gone(0));
  EXPECT_THAT(Why(0), HasSubstr("EnterFullParams with writeback"));
}

TEST_F(JobCutEdits, NobodyEntersBeforeAllNodesHaveSaidWhetherTheyEdited) {
  Begin();
  EnterPass(0);
  absl::SleepFor(absl::Milliseconds(30));
  EXPECT_EQ(Passes(0), 0);
  EnterPass(1);
  ASSERT_TRUE(AllInside(1));
  EXPECT_EQ(Told(0) + Told(1), 0);
}

TEST_F(JobCutEdits, ANodeWithoutEditsWritesNothingBackBesideOneWithSome) {
  Begin();
  EnterPass(0);
  EnterPass(1, /*has_edits=*/true);
  ASSERT_TRUE(AllInside(1));
  EXPECT_EQ(Told(0) * 10 + Told(1), 11) << "both are told";
  for (int node = 0; node < 2; ++node) LeavePass(node);
  WriteBackAll(7, 1);
  ASSERT_TRUE(AllAt(2)) << Why(0) << Why(1);
  EXPECT_EQ(Value(0), 0);
  EXPECT_EQ(Value(1), 7 + 32) << "what it holds of it";
  for (int node = 0; node < 2; ++node) {
    LeaveFullParams(node);
    EnterPass(node);
  }
  ASSERT_TRUE(AllInside(2));
  EXPECT_EQ(Told(0) * 10 + Told(1), 11);
}

TEST_F(JobCutEdits, WhatALostRankWroteBackIsTakenBackOnAllNodes) {
  Begin();
  for (int node = 0; node < 2; ++node) EnterPass(node, /*has_edits=*/true);
  ASSERT_TRUE(AllInside(1));
  for (int node = 0; node < 2; ++node) {
    LeavePass(node);
    WriteBack(node);
  }
  ASSERT_TRUE(AllInFullParams());
  for (int node = 0; node < 2; ++node) WriteWhole(node, 7);
  CommitEdits(0);
  EXPECT_TRUE(Until([&] { return job(0).nodes().promised(); }));
  Lose(1);
  ASSERT_TRUE(Gone(0) && Gone(1));
  for (int node = 0; node < 2; ++node) Attach(node);
  EXPECT_EQ(Value(0) + Value(1), 0);
  ASSERT_TRUE(AllAt(1));
  for (int node = 0; node < 2; ++node) EnterPass(node);
  EXPECT_TRUE(AllInside(1));
}

TEST_F(JobCutEdits, ARankThatIsLostWhereOthersEnterLetsThemGo) {
  Begin();
  EnterPass(0, /*has_edits=*/true);
  Lose(1);
  ASSERT_TRUE(Gone(0) && Gone(1));
  for (int node = 0; node < 2; ++node) Attach(node);
  for (int node = 0; node < 2; ++node) EnterPass(node);
  ASSERT_TRUE(AllInside(1));
  EXPECT_EQ(Told(0) + Told(1), 0);
}

}  // namespace
}  // namespace shardd
