// Ranks edit parameters in place over two or three nodes, beside the daemon's optimizer: what the daemons tell them
// where they enter a pass, and what becomes of what they write back.

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
  explicit JobNodesEdits(v1::Strategy strategy = v1::STRATEGY_HYBRID_SHARD, int nodes = 2)
      : JobNodesTest(nodes, strategy, /*outlives=*/false, /*in_trainers=*/false, /*edits=*/true) {}

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
  void WriteBack(int node, bool of_edits = true) {
    v1::Command command;
    command.mutable_enter_full_params()->set_writeback(true);
    command.mutable_enter_full_params()->set_of_edits(of_edits);
    Send(node, command);
  }
  void LeaveFullParams(int node) {
    v1::Command command;
    command.mutable_leave_full_params();
    Send(node, command);
  }
  std::string WaitOf(int node) {
    std::string text;
    OnLoop([&] { text = job(node).view().WaitText(0); });
    return text;
  }
  bool Waits(int node, const std::string& text) {
    return testing::PollUntil([&] { return WaitOf(node) == text; }, kPatience);
  }
  uint64_t Passes(int node) { return Word(node, &DaemonPage::passes); }
  uint64_t Told(int node) { return Word(node, &DaemonPage::hand_ins); }
  bool All(const std::function<bool(int node)>& holds) {
    for (int node = 0; node < count(); ++node) {
      if (!holds(node)) return false;
    }
    return true;
  }
  bool AllInside(uint64_t passes) {
    return testing::PollUntil([&] { return All([&](int node) { return Passes(node) == passes; }); }, kPatience);
  }
  bool AllInFullParams() {
    return testing::PollUntil(
        [&] { return All([&](int node) { return Word(node, &DaemonPage::full_params) > full_params_; }); }, kPatience);
  }
  bool AllAt(uint64_t version) {
    return Until([&] { return All([&](int node) { return job(node).committed().version() == version; }); });
  }
  // `node` alone has edited, or both.
  void WriteBackAll(float value, int node = -1) {
    for (int each = 0; each < count(); ++each) WriteBack(each);
    ASSERT_TRUE(AllInFullParams()) << Why(0) << Why(1);
    ++full_params_;
    for (int each = 0; each < count(); ++each) {
      if (node < 0 || node == each) WriteWhole(each, value);
    }
    for (int each = 0; each < count(); ++each) CommitParameters(each);
  }
  uint64_t full_params_ = 0;
};
class JobCutEdits : public JobNodesEdits {
 protected:
  explicit JobCutEdits(int nodes = 2) : JobNodesEdits(v1::STRATEGY_FULL_SHARD, nodes) {}
};
class JobThreeEdits : public JobNodesEdits {
 protected:
  JobThreeEdits() : JobNodesEdits(v1::STRATEGY_HYBRID_SHARD, 3) {}
};
class JobThreeCutEdits : public JobCutEdits {
 protected:
  JobThreeCutEdits() : JobCutEdits(3) {}
  // What the last node holds ends with it.
  float Last(int node) { return SlabAt<float>(job(node).memory().shards(), 0)[63]; }
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
  CommitParameters(1);
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

// The one would have loaded all, and the other nothing.
TEST_F(JobCutEdits, NodesThatEditWhileOthersLoadAreNamed) {
  Begin();
  WriteBack(0);
  WriteBack(1, /*of_edits=*/false);
  ASSERT_TRUE(Gone(0) && Gone(1));
  for (int node = 0; node < 2; ++node) {
    EXPECT_THAT(Why(node),
                AllOf(HasSubstr("node 1"), HasSubstr("asks to write others"), HasSubstr("of edits in place")))
        << node;
    Attach(node);
  }
  EXPECT_EQ(Value(0) + Value(1), 0);
}

TEST_F(JobCutEdits, RanksThatEnterAreToldForWhomTheyWait) {
  Begin();
  EnterPass(0);
  EXPECT_TRUE(Waits(0, "node 1 (host1:7000) has not entered the pass that others enter")) << WaitOf(0);
  EnterPass(1);
  ASSERT_TRUE(AllInside(1));
  for (int node = 0; node < 2; ++node) LeavePass(node);
  EnterPass(1);
  EXPECT_TRUE(Waits(1, "node 0 (host0:7000), which says when all nodes have entered the pass")) << WaitOf(1);
  EnterPass(0);
  ASSERT_TRUE(AllInside(2));
  EXPECT_EQ(WaitOf(0) + WaitOf(1), "");
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
  CommitParameters(0);
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

TEST_F(JobThreeEdits, AReplicaOfThreeThatEditsOtherwiseIsNamed) {
  Begin();
  for (int node = 0; node < 3; ++node) EnterPass(node, /*has_edits=*/true);
  ASSERT_TRUE(AllInside(1));
  for (int node = 0; node < 3; ++node) LeavePass(node);
  for (int node = 0; node < 3; ++node) WriteBack(node);
  ASSERT_TRUE(AllInFullParams());
  for (int node = 0; node < 3; ++node) WriteWhole(node, node == 2 ? 8 : 7);
  for (int node = 0; node < 3; ++node) CommitParameters(node);
  for (int node = 0; node < 3; ++node) {
    ASSERT_TRUE(Gone(node)) << node;
    EXPECT_THAT(Why(node), AllOf(HasSubstr("\"w\" on node 2"), HasSubstr("differs from node 0's"))) << node;
  }
  for (int node = 0; node < 3; ++node) {
    Attach(node);
    EXPECT_EQ(Value(node), 0) << node;
  }
}

TEST_F(JobThreeEdits, EditsOfThreeReplicasAreKeptWhoeverDiesNext) {
  Begin();
  WriteBackAll(7);
  ASSERT_TRUE(AllAt(2)) << Why(0) << Why(1) << Why(2);
  Kill(1);  // its ranks still wait for the commit, perhaps
  for (const int node : {0, 2}) ASSERT_TRUE(Gone(node));
  OpenAgain(1);
  for (int node = 0; node < 3; ++node) Attach(node);
  for (int node = 0; node < 3; ++node) EXPECT_EQ(Value(node), 7) << node;
  for (int node = 0; node < 3; ++node) EnterPass(node);
  ASSERT_TRUE(AllInside(1));
  TrainAll();
  for (int node = 0; node < 3; ++node) {
    EXPECT_TRUE(Until([&] { return job(node).view().committed_step() == 1; })) << node << Why(node);
    EXPECT_EQ(Value(node), 6) << node;
  }
}

TEST_F(JobThreeCutEdits, OneNodeOfThreeEditsAndAllCommit) {
  Begin();
  EnterPass(0);
  EnterPass(2, /*has_edits=*/true);
  EXPECT_TRUE(Waits(0, "node 1 (host1:7000) has not entered the pass that others enter")) << WaitOf(0);
  EnterPass(1);
  ASSERT_TRUE(AllInside(1));
  EXPECT_EQ(Told(0) * 100 + Told(1) * 10 + Told(2), 111);
  for (int node = 0; node < 3; ++node) LeavePass(node);
  WriteBackAll(7, 2);
  ASSERT_TRUE(AllAt(2)) << Why(0) << Why(1) << Why(2);
  EXPECT_EQ(Last(2), 7 + 63);
  EXPECT_EQ(Last(0) + Last(1), 0);
  Lose(1);
  for (int node = 0; node < 3; ++node) ASSERT_TRUE(Gone(node));
  for (int node = 0; node < 3; ++node) Attach(node);
  for (int node = 0; node < 3; ++node) EnterPass(node);
  ASSERT_TRUE(AllInside(1)) << Why(0) << Why(1) << Why(2);
  ASSERT_TRUE(AllAt(2));
  EXPECT_EQ(Last(2), 7 + 63) << "it was a version";
}

TEST_F(JobThreeCutEdits, WhatTwoOfThreeHaveSaidIsTakenBack) {
  Begin();
  for (int node = 0; node < 3; ++node) WriteBack(node);
  ASSERT_TRUE(AllInFullParams());
  for (int node = 0; node < 3; ++node) WriteWhole(node, 7);
  for (const int node : {0, 2}) CommitParameters(node);
  EXPECT_TRUE(Until([&] { return job(0).nodes().promised() && job(2).nodes().promised(); }));
  Lose(1);
  for (int node = 0; node < 3; ++node) ASSERT_TRUE(Gone(node));
  for (int node = 0; node < 3; ++node) Attach(node);
  ASSERT_TRUE(AllAt(1));
  for (int node = 0; node < 3; ++node) EXPECT_EQ(Last(node), 0) << node;
}

}  // namespace
}  // namespace shardd
