#ifndef SHARDD_TESTS_SERVER_JOB_PARTS_OVER_NODES_H_
#define SHARDD_TESTS_SERVER_JOB_PARTS_OVER_NODES_H_

#include <vector>

#include "tests/server/job/job_nodes_fixture.h"

namespace shardd {

// Several optimizers of one model over two nodes, whose steps go in parts: replicas, and parameters cut over the nodes.
// "w" is optimizer group 1's, "f" group 2's. Where they are cut node 0 has "w", and node 1 has "f".
class PartsOverNodes : public JobNodesTest, public ::testing::WithParamInterface<v1::Strategy> {
 protected:
  explicit PartsOverNodes(bool outlives = false)
      : JobNodesTest(2, GetParam(), outlives, /*in_trainers=*/false, /*edits=*/false, /*frozen=*/false,
                     /*several=*/true) {}
  bool cut() const { return nodes_[0].plan->cut_over_nodes; }
  void Backward(int node) {
    Submit(node, GradientOf(node));
    EndBackward(node);
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
  // Node 0 has decided the step, and does not show it.
  bool Decides() {
    return Until([&] {
      v1::Job described;
      (void)job(0).view().Describe(&described);
      return described.state() == v1::JOB_STATE_COMMITTING;
    });
  }
  bool IsUnsharded(int node) {  // on the loop
    const Session* const session = job(node).sessions()[0].get();
    return session != nullptr && session->handles[0].storage() == StorageState::kUnsharded;
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

inline std::string PartsName(const ::testing::TestParamInfo<v1::Strategy>& info) {
  return info.param == v1::STRATEGY_FULL_SHARD ? "Cut" : "Replicas";
}

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_JOB_PARTS_OVER_NODES_H_
