#ifndef SHARDD_TESTS_SERVER_JOB_STORES_OVER_NODES_H_
#define SHARDD_TESTS_SERVER_JOB_STORES_OVER_NODES_H_

// Ranks of two nodes that store their steps themselves, and what is seen of it.

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/server/job/job_nodes_fixture.h"

namespace shardd {

// Values are minus the step, states of the optimizer are twice the step.
class StoresOverNodes : public JobNodesTest {
 protected:
  explicit StoresOverNodes(v1::Strategy strategy, bool outlives = false)
      : JobNodesTest(2, strategy, outlives, /*in_trainers=*/true) {}

  int64_t first(int node) const { return node * (nodes_[0].plan->cut_over_nodes ? 32 : 0); }
  int64_t numel() const { return nodes_[0].plan->cut_over_nodes ? 32 : 64; }
  float* At(const JobSlab* slab, int node) {
    return SlabAt<float>(slab, first(node) * static_cast<int64_t>(sizeof(float)));
  }
  void Store(int node, float value, float state) {
    std::fill_n(At(job(node).memory().shards(), node), numel(), value);
    std::fill_n(At(job(node).memory().optimizer(), node), numel(), state);
  }
  void StoreStep(int node, int64_t step) { Store(node, -static_cast<float>(step), 2 * static_cast<float>(step)); }
  void Enter(int node, int64_t step = 0) {
    v1::Command command;
    command.mutable_enter_pass()->set_stepped(step > 0);
    if (step > 0) command.mutable_enter_pass()->set_trainer_state(absl::StrCat("step ", step));
    Send(node, command);
  }
  void Leave(int node) {
    v1::Command command;
    command.mutable_leave_pass();
    Send(node, command);
  }
  void Backward(int node) {
    Submit(node, 1);
    EndBackward(node);
    Leave(node);
  }
  uint64_t Passes(int node) { return Word(node, &DaemonPage::passes); }
  bool Attached(int node) {
    bool result = false;
    OnLoop([&] { result = job(node).sessions()[0].get() != nullptr; });
    return result;
  }
  void Pass(int64_t step = 0) {
    const std::array<uint64_t, 2> before = {Passes(0), Passes(1)};
    for (int node = 0; node < 2; ++node) Enter(node, step);
    for (int node = 0; node < 2; ++node) {
      ASSERT_TRUE(testing::PollUntil([&] { return Passes(node) == before[static_cast<size_t>(node)] + 1; }, kPatience))
          << "node " << node << Why(node);
    }
  }
  // Steps in a pass that all are inside of, up to the next pass.
  void Step(int64_t step) {
    for (int node = 0; node < 2; ++node) Backward(node);
    for (int node = 0; node < 2; ++node) StoreStep(node, step);
    Pass(step);
  }
  // `alike`: nobody is on the way to another version.
  void IsOf(int node, int64_t step, bool alike = true) {
    EXPECT_EQ(job(node).committed().step(), step) << "node " << node << Why(node);
    EXPECT_EQ(Value(node), -static_cast<float>(step)) << "node " << node;
    EXPECT_EQ(*At(job(node).memory().optimizer(), node), 2 * static_cast<float>(step)) << "node " << node;
    EXPECT_EQ(job(node).committed().trainer_states()[0], step == 0 ? "" : absl::StrCat("step ", step));
    if (!alike) return;
    EXPECT_EQ(job(0).committed().version(), job(1).committed().version());
  }
  // Its rank dies, and every node has ended its attempt.
  void LoseRank(int node) {
    std::array<uint64_t, 2> before = {};
    OnLoop([&] {
      for (int of = 0; of < 2; ++of) before[static_cast<size_t>(of)] = job(of).committed().epoch();
      job(node).SessionLost(0, "killed");
    });
    for (int of = 0; of < 2; ++of) {
      ASSERT_TRUE(Until([&] { return job(of).committed().epoch() > before[static_cast<size_t>(of)]; })) << of;
    }
  }
  float Read(int node) { return *At(job(node).memory().parameters(), node); }
  void AttachAll() {
    for (int node = 0; node < 2; ++node) {
      if (!Attached(node)) Attach(node);
    }
  }
  void GoesOnFrom(int64_t step) {
    AttachAll();
    for (int node = 0; node < 2; ++node) IsOf(node, step);
    Pass();
    for (int node = 0; node < 2; ++node) EXPECT_EQ(Read(node), -static_cast<float>(step));
    Step(step + 1);
    for (int node = 0; node < 2; ++node) IsOf(node, step + 1);
  }
  // Both have stored step 2, and entered with it.
  void StoreStepTwo() {
    Begin();
    Pass();
    Step(1);
    for (int node = 0; node < 2; ++node) Backward(node);
    for (int node = 0; node < 2; ++node) StoreStep(node, 2);
  }
  // A rank as a trainer that attaches again, and steps to the end.
  struct Life {
    uint64_t epoch = 0;
    uint64_t passes = 0;
    int64_t step = 0;
    bool torn = false;
    enum class At { kOutside, kEntering, kInside } at = At::kOutside;
  };
  // What it does next, if it can do anything.
  void Live(int node, Life* life, int64_t steps, std::mt19937_64* rng) {
    uint64_t epoch = 0;
    OnLoop([&] { epoch = job(node).committed().epoch(); });
    if (!Attached(node)) {
      if (!TryAttach(node).ok()) return;
      OnLoop([&] {
        *life = Life();
        life->epoch = job(node).committed().epoch();
        life->step = job(node).committed().step();
        if (job(node).committed().version() > 0) IsOf(node, life->step, /*alike=*/false);
      });
      return;
    }
    if (life->epoch != epoch) return;  // it has ended since
    bool initial = false;
    OnLoop([&] { initial = job(node).committed().version() == 0; });
    if (initial) {
      if (life->step == 0) CommitParameters(node);
      life->step = -1;
      return;
    }
    life->step = std::max<int64_t>(life->step, 0);
    switch (life->at) {
      case Life::At::kOutside:
        Enter(node);
        life->at = Life::At::kEntering;
        return;
      case Life::At::kEntering:
        if (Passes(node) == life->passes) return;
        ++life->passes;
        life->at = Life::At::kInside;
        OnLoop([&] {
          if (Session* session = job(node).sessions()[0].get(); session != nullptr && session->epoch() == life->epoch) {
            EXPECT_EQ(Read(node), -static_cast<float>(life->step)) << "node " << node;
          }
        });
        return;
      case Life::At::kInside:
        if (life->step == steps) return;
        if (!std::exchange(life->torn, true)) {
          Backward(node);
          Store(node, 1000, 1000);
          if ((*rng)() % 4 == 0) return;  // for a while
        }
        life->torn = false;
        StoreStep(node, life->step + 1);
        Enter(node, ++life->step);
        life->at = Life::At::kEntering;
        return;
    }
  }
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_JOB_STORES_OVER_NODES_H_
