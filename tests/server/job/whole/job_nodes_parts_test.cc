// Several optimizers of one model over two nodes, whose steps go in parts: replicas, and parameters cut over the nodes.

#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "server/job/nodes/state_transfers.h"
#include "server/storage/job_memory.h"
#include "server/storage/undo_slab.h"
#include "tests/server/job/job_nodes_fixture.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// "w" is optimizer group 1's, "f" group 2's. Where they are cut node 0 has "w", and node 1 has "f".
class JobNodesParts : public JobNodesTest, public ::testing::WithParamInterface<v1::Strategy> {
 protected:
  explicit JobNodesParts(bool outlives = false)
      : JobNodesTest(2, GetParam(), outlives, /*in_trainers=*/false, /*edits=*/false, /*frozen=*/false,
                     /*several=*/true) {}
  bool cut() const { return nodes_[0].plan->cut_over_nodes; }
  void Backward(int node) {
    Submit(node, GradientOf(node));
    v1::Command command;
    command.mutable_backward_done()->set_last(true);
    Send(node, command);
  }
  void StepOf(int node, const std::vector<int>& left, bool part) {
    v1::Command command;
    for (int group = 0; group < 3; ++group) command.mutable_step()->add_groups()->set_lr(0.5);
    command.mutable_step()->mutable_left_groups()->Add(left.begin(), left.end());
    command.mutable_step()->set_part(part);
    Send(node, command);
  }
  void First(int node) { StepOf(node, {0, 2}, /*part=*/true); }  // of "w"
  void Last(int node) { StepOf(node, {0, 1}, /*part=*/false); }  // of "f"
  void StepAll(int64_t step) {
    for (int node = 0; node < 2; ++node) Backward(node);
    FirstOfAll();
    for (int node = 0; node < 2; ++node) Last(node);
    for (int node = 0; node < 2; ++node) {
      EXPECT_TRUE(Until([&] { return job(node).view().committed_step() == step; })) << "node " << node << Why(node);
    }
    ExpectAll(-static_cast<float>(step), -static_cast<float>(step));
  }
  void FirstOfAll() {
    for (int node = 0; node < 2; ++node) First(node);
    for (int node = 0; node < 2; ++node) ASSERT_TRUE(PartsAre(node, 1)) << node << Why(node);
  }
  bool PartsAre(int node, int64_t parts) {
    return testing::PollUntil([&] { return StreamOf(node).Committed().parts() == parts; }, kPatience);
  }
  bool Promises(int node) {
    return Until([&] { return job(node).nodes().promised(); });
  }
  float At(int node, int64_t element) {
    return *SlabAt<float>(job(node).memory().shards(), element * static_cast<int64_t>(sizeof(float)));
  }
  // What the nodes hold of the two.
  void ExpectAll(float w, float f) {
    for (int node = 0; node < 2; ++node) {
      for (const int64_t element : {0, 31}) {
        const bool has_w = !cut() || node == 0, has_f = !cut() || node == 1;
        EXPECT_EQ(has_w ? At(node, element) : w, w) << "w, node " << node;
        EXPECT_EQ(has_f ? At(node, 32 + element) : f, f) << "f, node " << node;
      }
    }
  }
  void HoldCopier() {
    copier_.Post({getuid(), 1}, [this] {
      go_.WaitForNotificationWithTimeout(kPatience);
      return true;
    });
  }
  void LetCopierGo() {
    if (!go_.HasBeenNotified()) go_.Notify();
  }
  ~JobNodesParts() override { LetCopierGo(); }
  absl::Notification go_;
  // Node 0 has decided the step, and does not show it.
  bool Decides() {
    return Until([&] {
      v1::Job described;
      (void)job(0).view().Describe(&described);
      return described.state() == v1::JOB_STATE_COMMITTING;
    });
  }
  void AttachAll() {
    for (int node = 0; node < 2; ++node) {
      bool attached = false;
      OnLoop([&] { attached = job(node).sessions()[0].get() != nullptr; });
      if (!attached) Attach(node);
    }
  }
  // All are at `step`, where what came behind it is put back, and go on.
  void ExpectAllBackAt(int64_t step) {
    ASSERT_TRUE(Gone(0) && Gone(1));
    AttachAll();  // which is refused before all is back
    for (int node = 0; node < 2; ++node) {
      OnLoop([&] { EXPECT_EQ(job(node).committed().step_counts(), std::vector<int64_t>(2, step)) << node; });
    }
    ExpectAll(-static_cast<float>(step), -static_cast<float>(step));
    StepAll(step + 1);
  }
  // Both have made a part of the second step.
  void PauseBetweenParts() {
    Begin();
    StepAll(1);
    for (int node = 0; node < 2; ++node) Backward(node);
    FirstOfAll();
    ExpectAll(-2, -1);
  }
};

TEST_P(JobNodesParts, PartsAreSeenAtOnceAndCommittedTogether) {
  PauseBetweenParts();
  for (int node = 0; node < 2; ++node) EXPECT_EQ(job(node).committed().step(), 1);
  for (int node = 0; node < 2; ++node) Last(node);
  for (int node = 0; node < 2; ++node) {
    ASSERT_TRUE(Until([&] { return job(node).committed().step() == 2; })) << Why(node);
  }
  ExpectAll(-2, -2);
  StepAll(3);
}

TEST_P(JobNodesParts, ARankLostBetweenPartsTakesAllNodesBack) {
  PauseBetweenParts();
  Lose(1);
  ExpectAllBackAt(1);
}

TEST_P(JobNodesParts, ALinkLostBetweenPartsTakesAllNodesBack) {
  PauseBetweenParts();
  Last(0);
  wire_.SetUp(false);
  wire_.SetUp(true);
  ExpectAllBackAt(1);
}

// Node 0 makes the part, and node 1 never hears of it.
TEST_P(JobNodesParts, APartThatOneNodeMissesIsPutBackOnTheOther) {
  Begin();
  StepAll(1);
  for (int node = 0; node < 2; ++node) Backward(node);
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_decided() && to == 1; });
  for (int node = 0; node < 2; ++node) First(node);
  ASSERT_TRUE(PartsAre(0, 1));
  EXPECT_FALSE(job(1).nodes().promised()) << "of a part nothing is promised";
  wire_.Drop(nullptr);
  wire_.SetUp(false);
  wire_.SetUp(true);
  ExpectAllBackAt(1);
}

TEST_P(JobNodesParts, OtherPartsOnAnotherNodeAreAnErrorAtOnce) {
  Begin();
  StepAll(1);
  for (int node = 0; node < 2; ++node) Backward(node);
  First(0);
  StepOf(1, {0, 1}, /*part=*/true);
  for (int node = 0; node < 2; ++node) {
    ASSERT_TRUE(Gone(node));
    EXPECT_THAT(Why(node), AllOf(HasSubstr("node 1 (host1:7000"), HasSubstr("left_groups (got [0, 1], want [0, 2])")));
  }
  ExpectAllBackAt(1);
}

TEST_P(JobNodesParts, AWholeStepBesideAPartIsAnErrorAtOnce) {
  PauseBetweenParts();
  StepOf(0, {0, 1}, /*part=*/true);
  Last(1);
  for (int node = 0; node < 2; ++node) {
    ASSERT_TRUE(Gone(node));
    EXPECT_THAT(Why(node), AllOf(HasSubstr("node 1 (host1:7000"), HasSubstr("part (got false, want true)")));
  }
  ExpectAllBackAt(1);
}

// Its ranks go on with a forward, and the others wait for the rest of the step.
TEST_P(JobNodesParts, ANodeThatLeavesOutItsLastPartIsToldAtOnce) {
  PauseBetweenParts();
  Last(0);
  v1::Command command;
  command.mutable_unshard()->set_phase(v1::PHASE_FORWARD);
  Send(1, command);
  for (int node = 0; node < 2; ++node) {
    ASSERT_TRUE(Gone(node));
    EXPECT_THAT(Why(node), HasSubstr("send Step without `part` first"));
  }
  ExpectAllBackAt(1);
}

// It has promised the step behind its parts, which node 0 has decided: they are committed with it.
TEST_P(JobNodesParts, AStepDecidedBehindPartsOutlivesItsLink) {
  PauseBetweenParts();
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_decided() && to == 1; });
  for (int node = 0; node < 2; ++node) Last(node);
  ASSERT_TRUE(Decides());
  ASSERT_TRUE(Promises(1));
  wire_.SetUp(false);
  wire_.Drop(nullptr);
  wire_.SetUp(true);
  for (int node = 0; node < 2; ++node) {
    ASSERT_TRUE(Until([&] { return job(node).view().committed_step() == 2; })) << node << Why(node);
  }
  ASSERT_TRUE(Gone(0));  // node 1 goes on in its epoch, behind the step
  ExpectAll(-2, -2);
  AttachAll();
  StepAll(3);
}

// Nobody decides what node 1 has promised, as node 0 has gone back.
TEST_P(JobNodesParts, AStepPromisedInVainBehindPartsIsPutBack) {
  PauseBetweenParts();
  Last(1);
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_reduced() && to == 0; });
  Last(0);
  ASSERT_TRUE(Promises(1));
  Lose(0);
  wire_.SetUp(false);
  wire_.Drop(nullptr);
  wire_.SetUp(true);
  ExpectAllBackAt(1);
}

INSTANTIATE_TEST_SUITE_P(All, JobNodesParts, ::testing::Values(v1::STRATEGY_HYBRID_SHARD, v1::STRATEGY_FULL_SHARD),
                         [](const auto& info) { return info.param == v1::STRATEGY_FULL_SHARD ? "Cut" : "Replicas"; });

// As behind other jobs' copies.
TEST_P(JobNodesParts, NobodyComesBeforeOldBytesAreBackHoweverManyEpochsEnd) {
  PauseBetweenParts();
  HoldCopier();
  for (const bool up : {false, true, false, true}) {
    wire_.SetUp(0, 1, up);
    ASSERT_TRUE(Gone(0) && Gone(1));
    EXPECT_FALSE(TryAttach(0).ok());
  }
  EXPECT_EQ(At(0, 0), -2) << "nothing is back yet";
  LetCopierGo();
  ExpectAllBackAt(1);
}

// A node that is sent another's state may begin again at a version whose old bytes it has kept.
TEST_P(JobNodesParts, WhoseStateIsLostForgetsOldBytes) {
  Begin();
  StepAll(1);
  const int changed = 0;  // "w", by the first part
  const auto has_old_bytes = [&] { return job(changed).memory().undo()->Has(1); };
  ASSERT_TRUE(Until(has_old_bytes));
  OnLoop([&] { const_cast<StateTransfers&>(job(changed).nodes().states()).NodeBeginFetch(1, /*transfer=*/7); });
  EXPECT_TRUE(Until([&] { return !has_old_bytes(); }));
}

class JobNodesPartsReplicas : public JobNodesParts {};

// The new daemon of node 0 has nothing, and is sent the version before the parts.
TEST_P(JobNodesPartsReplicas, ANewNode0IsSentWhatWasBeforePromisedParts) {
  PauseBetweenParts();
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_reduced() && to == 0; });
  for (int node = 0; node < 2; ++node) Last(node);
  ASSERT_TRUE(Promises(1));
  Kill(0);
  wire_.Drop(nullptr);
  OpenAgain(0);
  ASSERT_TRUE(Until([&] { return job(0).committed().version() == 2; })) << Why(1);
  ASSERT_TRUE(Gone(1));
  AttachAll();
  ExpectAll(-1, -1);
  StepAll(2);
}

// The same where its rank is lost, and the end of its epoch waits for node 0.
TEST_P(JobNodesPartsReplicas, ANewNode0IsSentNothingThatIsNotBack) {
  PauseBetweenParts();
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_reduced() && to == 0; });
  for (int node = 0; node < 2; ++node) Last(node);
  ASSERT_TRUE(Promises(1));
  Lose(1);
  Kill(0);
  HoldCopier();
  wire_.Drop(nullptr);
  OpenAgain(0);
  ASSERT_TRUE(Until([&] { return !job(1).nodes().promised(); })) << Why(1);
  EXPECT_FALSE(testing::PollUntil([&] { return job(0).committed().version() != 0; }, absl::Milliseconds(300)));
  LetCopierGo();
  ASSERT_TRUE(Until([&] { return job(0).committed().version() == 2; })) << Why(1);
  AttachAll();
  ExpectAll(-1, -1);
  StepAll(2);
}

INSTANTIATE_TEST_SUITE_P(All, JobNodesPartsReplicas, ::testing::Values(v1::STRATEGY_HYBRID_SHARD));

class JobNodesPartsSuccessors : public JobNodesParts {
 protected:
  JobNodesPartsSuccessors() : JobNodesParts(/*outlives=*/true) {}
  // Another daemon in the place of node 1's, which has promised a step behind its first part.
  void SucceedNode1() {
    CommittedFacts facts;
    TakeUpLog::Left left;
    const auto copy = [](const JobSlab* slab, int64_t bytes) {
      return std::string(slab->At(0), static_cast<size_t>(bytes));
    };
    const MemoryPlan memory = nodes_[1].plan->memory;
    std::string shards, gradients;
    OnLoop([&] {
      const Committed& committed = job(1).committed();
      facts.epoch = committed.epoch() + 1;
      facts.version = committed.version();
      facts.step = committed.step();
      facts.step_counts = {1, 1};
      facts.trainer_states = {""};
      facts.gradients_stay = false;
      shards = copy(job(1).memory().shards(), memory.shards_bytes);
      gradients = copy(job(1).memory().gradients(), memory.gradients_bytes);
      const auto log = TakeUpLog::TakeUp(UniqueFd(fcntl(nodes_[1].log_fd.get(), F_DUPFD_CLOEXEC, 0)),
                                         TakeUpLog::SizesFor(*nodes_[1].plan));
      ASSERT_TRUE(log.ok()) << log.status();
      left = *(*log)->Read();
    });
    ASSERT_TRUE(left.promised.has_value());
    EXPECT_EQ(left.promised->parts(), 1);
    ASSERT_EQ(left.promised->step_counts_size(), 2);
    EXPECT_EQ(left.promised->step_counts(0), 2) << "the first part has stepped it";
    EXPECT_EQ(left.promised->step_counts(1), 1);
    facts.promised = left.promised;
    Kill(1);
    wire_.Drop(nullptr);
    before_open_ = [&](JobCore::Init* init) {
      // As the part found it; then as it has left it.
      const int64_t first = cut() ? 32 * 4 : 0;
      const int64_t bytes = cut() ? 32 * 4 : 64 * 4;
      std::vector<float> old(static_cast<size_t>(bytes / 4), -1);
      ASSERT_TRUE(init->memory->shards()->Write(first, reinterpret_cast<const char*>(old.data()), bytes).ok());
      ASSERT_TRUE(init->memory->undo()->Save(init->memory->shards(), first, bytes, facts.version).ok());
      ASSERT_TRUE(init->memory->shards()->Write(first, shards.data() + first, bytes).ok());
      ASSERT_TRUE(init->memory->gradients()->Write(first, gradients.data() + first, bytes).ok());
      init->committed = facts;
      NodeLeft& of_node = init->nodes->left.emplace();
      of_node.promised_in = facts.promised->generation();
      of_node.promised_parts = true;
    };
    OpenAgain(1);
    before_open_ = nullptr;
  }
};

TEST_P(JobNodesPartsSuccessors, AStepThatASuccessorHearsOfHasItsParts) {
  PauseBetweenParts();
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_decided() && to == 1; });
  for (int node = 0; node < 2; ++node) Last(node);
  ASSERT_TRUE(Decides());
  ASSERT_TRUE(Promises(1));
  ASSERT_NO_FATAL_FAILURE(SucceedNode1());
  for (int node = 0; node < 2; ++node) {
    ASSERT_TRUE(Until([&] { return job(node).view().committed_step() == 2; })) << node << Why(0);
    OnLoop([&] { EXPECT_EQ(job(node).committed().step_counts(), std::vector<int64_t>(2, 2)) << node; });
  }
  ASSERT_TRUE(Gone(0));
  ExpectAll(-2, -2);
  AttachAll();
  StepAll(3);
}

TEST_P(JobNodesPartsSuccessors, PartsPromisedInVainArePutBackByASuccessor) {
  PauseBetweenParts();
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_reduced() && to == 0; });
  for (int node = 0; node < 2; ++node) Last(node);
  ASSERT_TRUE(Promises(1));
  ASSERT_NO_FATAL_FAILURE(SucceedNode1());
  ExpectAllBackAt(1);
}

INSTANTIATE_TEST_SUITE_P(All, JobNodesPartsSuccessors,
                         ::testing::Values(v1::STRATEGY_HYBRID_SHARD, v1::STRATEGY_FULL_SHARD),
                         [](const auto& info) { return info.param == v1::STRATEGY_FULL_SHARD ? "Cut" : "Replicas"; });

}  // namespace
}  // namespace shardd
