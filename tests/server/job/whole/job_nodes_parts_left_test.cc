// Several optimizers of one model over two nodes: who is sent, gathers or takes up what parts of a step have changed.

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/storage/job_memory.h"
#include "server/storage/undo_slab.h"
#include "server/turns/turn_queue.h"
#include "tests/server/job/parts_over_nodes.h"

namespace shardd {
namespace {

class JobNodesPartsReplicas : public PartsOverNodes {};

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

INSTANTIATE_TEST_SUITE_P(All, JobNodesPartsReplicas, ::testing::Values(v1::STRATEGY_HYBRID_SHARD));

class JobNodesPartsCut : public PartsOverNodes {};

// Node 0 has put back what its shards were, and gathers before node 1 has.
TEST_P(JobNodesPartsCut, WhatIsBeingPutBackIsGatheredBehindThat) {
  static TurnQueue* const copier = new TurnQueue("copier 1");  // outlives the jobs
  before_open_ = [](JobCore::Init* init) { init->copier = copier; };
  Kill(1);
  OpenAgain(1);
  before_open_ = nullptr;
  Begin();
  StepAll(1);
  for (int node = 0; node < 2; ++node) Backward(node);
  for (int node = 0; node < 2; ++node) StepOf(node, {0, 1}, /*part=*/true);
  ASSERT_TRUE(PartsAre(0, 1) && PartsAre(1, 1));
  ExpectAll(-1, -2);
  const auto goes_on = std::make_shared<absl::Notification>();
  copier->Post({getuid(), 1}, [goes_on] { return goes_on->WaitForNotificationWithTimeout(kPatience), true; });
  Lose(0);
  ASSERT_TRUE(Gone(0) && Gone(1));
  Attach(0);
  v1::Command unshard;
  unshard.mutable_unshard()->set_phase(v1::PHASE_FORWARD);
  Send(0, unshard);
  absl::SleepFor(absl::Milliseconds(100));
  OnLoop([&] { EXPECT_FALSE(IsUnsharded(0)) << "node 1 would send what the part has changed"; });
  EXPECT_FALSE(TryAttach(1).ok());
  goes_on->Notify();
  ASSERT_TRUE(Until([&] { return IsUnsharded(0); })) << Why(0);
  for (const int64_t element : {0, 31, 32, 63}) {
    EXPECT_EQ(SlabAt<float>(job(0).memory().pool(), 0)[element], -1) << element;
  }
  copier->Drain();
}

INSTANTIATE_TEST_SUITE_P(All, JobNodesPartsCut, ::testing::Values(v1::STRATEGY_FULL_SHARD));

class JobNodesPartsSuccessors : public PartsOverNodes {
 protected:
  JobNodesPartsSuccessors() : PartsOverNodes(/*outlives=*/true) {}
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
                         ::testing::Values(v1::STRATEGY_HYBRID_SHARD, v1::STRATEGY_FULL_SHARD), PartsName);

}  // namespace
}  // namespace shardd
