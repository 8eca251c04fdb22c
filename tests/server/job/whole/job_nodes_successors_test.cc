// Daemons of a job over nodes whose trainers store their steps die behind their promise of a pass without a step, and
// what a custodian has kept of them is taken up.

#include <algorithm>
#include <string>
#include <vector>

#include "tests/server/job/stores_over_nodes.h"

namespace shardd {
namespace {

class JobNodesSuccessors : public StoresOverNodes {
 protected:
  JobNodesSuccessors() : StoresOverNodes(v1::STRATEGY_FULL_SHARD) {}
  // All ranks are inside of a pass of version 2, outside of which they have stored 7, and 8 as optimizer state.
  void StoreInAPass() {
    Begin();
    Pass();
    for (int node = 0; node < 2; ++node) Leave(node);
    for (int node = 0; node < 2; ++node) Store(node, 7, 8);
  }
  // Another daemon in the place of node 1's, which has promised what its next snapshot has.
  void SucceedNode1() {
    CommittedFacts facts;
    std::string kept;
    uint64_t generation = 0;
    OnLoop([&] {
      generation = job(1).nodes().generation();
      const Committed& committed = job(1).committed();
      facts.epoch = committed.epoch() + 1;
      facts.version = committed.version();
      facts.step_counts = committed.step_counts();
      facts.trainer_states = {""};
      facts.in_snapshot = true;
      const MemoryPlan& memory = nodes_[1].plan->memory;
      kept.assign(job(1).memory().kept()->At(0), static_cast<size_t>(memory.kept_bytes));
      facts.second_snapshot = *At(job(1).memory().kept(), 1) == 7;  // the first is the next one
    });
    v1::PromisedValuesRecord& promised = facts.promised_values.emplace();
    promised.set_generation(generation);
    promised.set_version(facts.version + 1);
    for (const int64_t count : facts.step_counts) promised.add_step_counts(count);
    promised.add_trainer_states("");
    Kill(1);
    wire_.Drop(nullptr);
    ASSERT_TRUE(Gone(0));
    before_open_ = [&](JobCore::Init* init) {
      std::copy(kept.begin(), kept.end(), init->memory->kept()->At(0));
      init->committed = facts;
      NodeLeft& left = init->nodes->left.emplace();
      left.promised_in = generation;
      left.promised_values = true;
    };
    OpenAgain(1);
    before_open_ = nullptr;
  }
};

// Nobody has attached when it hears of the version: the snapshot of before is not copied over it.
TEST_F(JobNodesSuccessors, APassThatASuccessorHearsOfIsInItsShards) {
  StoreInAPass();
  const uint64_t version = job(0).committed().version();
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_values_agreed() && to == 1; });
  for (int node = 0; node < 2; ++node) Enter(node);
  ASSERT_TRUE(Until([&] { return job(0).committed().version() == version + 1; }));
  ASSERT_NO_FATAL_FAILURE(SucceedNode1());
  ASSERT_TRUE(Until([&] { return job(1).committed().version() == version + 1; })) << Why(0);
  AttachAll();
  for (int node = 0; node < 2; ++node) {
    EXPECT_EQ(Value(node), 7) << node;
    EXPECT_EQ(*At(job(node).memory().optimizer(), node), 8) << node;
  }
  Pass();
  for (int node = 0; node < 2; ++node) EXPECT_EQ(Read(node), 7) << node;
}

TEST_F(JobNodesSuccessors, APassPromisedInVainIsTakenBackByASuccessor) {
  StoreInAPass();
  Enter(1);
  ASSERT_TRUE(Until([&] { return job(1).nodes().promised(); }));
  ASSERT_NO_FATAL_FAILURE(SucceedNode1());
  GoesOnFrom(0);
}

}  // namespace
}  // namespace shardd
