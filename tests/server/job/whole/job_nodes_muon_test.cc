// Muon over two nodes, replicas or cut: every matrix has the bits of an update of the whole one, wherever it lies.

#include <cmath>
#include <tuple>

#include "common/plan/node_part.h"
#include "common/plan/whole_params.h"
#include "common/tensor/muon.h"
#include "server/optimizer/optimizer.h"
#include "tests/server/job/job_nodes_fixture.h"

namespace shardd {
namespace {

constexpr const char* kMatrices[] = {"a", "b", "c"};
constexpr double kLr = 0.02, kDecay = 0.1, kMomentum = 0.95, kEps = 1e-7;

// Muon for three matrices, of which cut over two nodes each node has some, and SGD for "v".
void DescribeModel(v1::Layout layout, bool one_matrix, SpecBuilder* builder) {
  builder->config().set_layout(layout);
  v1::OptimizerConfig::Group& muon = *builder->config().mutable_optimizer()->add_groups();
  muon.set_kind(v1::OPTIMIZER_KIND_MUON);
  const std::vector<int64_t> shapes[] = {{6, 4}, {4, 8}, {2, 3}};
  for (size_t i = 0; i < (one_matrix ? 1 : std::size(kMatrices)); ++i) {
    builder->Param(0, kMatrices[i], shapes[i]);
    muon.add_fqns(kMatrices[i]);
  }
  builder->Param(0, "v", {5});
  v1::OptimizerConfig::Group& sgd = *builder->config().mutable_optimizer()->add_groups();
  sgd.set_kind(v1::OPTIMIZER_KIND_SGD);
  sgd.add_fqns("v");
}

class MuonOverNodes : public JobNodesTest {
 protected:
  MuonOverNodes(v1::Strategy strategy, v1::Layout layout, bool one_matrix = false)
      : JobNodesTest(2, strategy, /*outlives=*/false, /*in_trainers=*/false, /*edits=*/false, /*frozen=*/false,
                     /*several=*/false,
                     [layout, one_matrix](SpecBuilder* builder) { DescribeModel(layout, one_matrix, builder); }) {}
  const ShardPlan& plan(int node) const { return *nodes_[static_cast<size_t>(node)].plan; }
  // Numbers whose sums and means over both nodes are exact.
  static float GradientAt(int node, int64_t step, int param, int64_t i) {
    return static_cast<float>((i * 7 + step * 5 + param * 3 + node * 2) % 11 - 5);
  }
  void Backward(int node, int64_t step) {
    OnLoop([&] {
      const Session* const session = job(node).sessions()[0].get();
      if (session == nullptr) return;
      for (size_t p = 0; p < plan(node).params.size(); ++p) {
        const ParamPlan& param = plan(node).params[p];
        const FlatParamPlan& flat = plan(node).flat_params[static_cast<size_t>(param.flat_param)];
        auto* const slot =
            reinterpret_cast<float*>(const_cast<char*>(session->slot(0)) + flat.slot_offset_bytes) + param.offset;
        for (int64_t i = 0; i < param.numel; ++i) slot[i] = GradientAt(node, step, static_cast<int>(p), i);
      }
    });
    SubmitSlot(node);
    EndBackward(node);
  }
  void Step(int node, const std::vector<int>& left = {}, bool part = false) {
    v1::Command command;
    v1::Step& step = *command.mutable_step();
    step.add_groups();
    v1::HyperParameters& h = *step.add_groups();
    h.set_lr(kLr), h.set_weight_decay(kDecay), h.set_momentum(kMomentum), h.set_nesterov(true), h.set_eps(kEps);
    h.set_ns_a(3.4445), h.set_ns_b(-4.775), h.set_ns_c(2.0315), h.set_ns_steps(5);
    step.add_groups()->set_lr(0.5);
    step.set_max_grad_norm(max_norm_);
    step.mutable_left_groups()->Add(left.begin(), left.end());
    step.set_part(part);
    Send(node, command);
  }
  void Await(int64_t step) {
    for (int node = 0; node < 2; ++node) {
      ASSERT_TRUE(Until([&] { return job(node).view().committed_step() == step; })) << node << Why(node);
    }
  }
  void TrainTo(int64_t step) {
    for (int node = 0; node < 2; ++node) Backward(node, step);
    for (int node = 0; node < 2; ++node) Step(node);
    ASSERT_NO_FATAL_FAILURE(Await(step));
    factors_.push_back(StreamOf(0).Committed().clip_factor());
    EXPECT_EQ(StreamOf(1).Committed().clip_factor(), factors_.back());
  }
  struct Whole {
    std::vector<float> p, buf;
  };
  // The unsharded parameter behind `steps` steps; all begin with zeros.
  Whole WholeOf(int param, int64_t steps) const {
    const ParamPlan& of = plan(0).params[static_cast<size_t>(param)];
    Whole whole = {std::vector<float>(static_cast<size_t>(of.numel)),
                   std::vector<float>(static_cast<size_t>(of.numel))};
    std::vector<float> g = whole.p;
    for (int64_t step = 1; step <= steps; ++step) {
      for (int64_t i = 0; i < of.numel; ++i) {
        g[static_cast<size_t>(i)] = (GradientAt(0, step, param, i) + GradientAt(1, step, param, i)) / 2;
      }
      const double factor = factors_[static_cast<size_t>(step - 1)];
      if (!IsUpdatedWhole(plan(0), param)) {
        for (size_t i = 0; i < g.size(); ++i) whole.p[i] -= 0.5F * (g[i] * static_cast<float>(factor));
        continue;
      }
      std::vector<char> room(static_cast<size_t>(MuonWorkspaceBytes(of.shape[0], of.shape[1])) + 64);
      MuonMatrix matrix;
      matrix.params = {kLr, kDecay, kMomentum, kEps, true, 3.4445, -4.775, 2.0315, 5, false, factor};
      matrix.rows = of.shape[0], matrix.cols = of.shape[1], matrix.p = whole.p.data(), matrix.param_dtype = of.dtype;
      matrix.g = g.data(), matrix.buf = whole.buf.data();
      matrix.workspace = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
      RunMuonFrom(matrix, 0, nullptr, 0);
    }
    return whole;
  }
  // Whatever each node has of it is of the whole, and all of it is there.
  void ExpectWhole(int64_t steps) {
    for (size_t p = 0; p < plan(0).params.size(); ++p) {
      const int param = static_cast<int>(p);
      const Whole want = WholeOf(param, steps);
      int64_t held = 0;
      for (int node = 0; node < 2; ++node) {
        const ParamPlan& of = plan(node).params[p];
        const FlatParamPlan& flat = plan(node).flat_params[static_cast<size_t>(of.flat_param)];
        const ParamRange own =
            plan(node).cut_over_nodes ? NodeRangeOf(plan(node), param, node) : ParamRange{0, of.numel};
        held += own.numel;
        const float* const values = SlabAt<float>(job(node).memory().shards(), flat.shards_offset_bytes) + of.offset;
        const float* const state =
            SlabAt<float>(job(node).memory().optimizer(), flat.optimizer_offset_bytes) + of.offset;
        for (int64_t i = own.first; i < own.first + own.numel; ++i) {
          ASSERT_EQ(values[i], want.p[static_cast<size_t>(i)]) << of.fqn << " " << i << " on node " << node;
          if (IsUpdatedWhole(plan(node), param)) {
            ASSERT_EQ(state[i], want.buf[static_cast<size_t>(i)]) << of.fqn << " " << i << " on node " << node;
          }
        }
      }
      EXPECT_EQ(held, plan(0).params[p].numel * (plan(0).cut_over_nodes ? 1 : 2));
    }
  }
  double max_norm_ = 0;
  std::vector<double> factors_;  // of the steps
};

class JobNodesMuon : public MuonOverNodes, public ::testing::WithParamInterface<std::tuple<v1::Strategy, v1::Layout>> {
 protected:
  JobNodesMuon() : MuonOverNodes(std::get<0>(GetParam()), std::get<1>(GetParam())) {}
};

TEST_P(JobNodesMuon, MatricesHaveTheBitsOfTheUnshardedRun) {
  Begin();
  for (int64_t step = 1; step <= 4; ++step) ASSERT_NO_FATAL_FAILURE(TrainTo(step));
  ExpectWhole(4);
}

TEST_P(JobNodesMuon, AreClippedByTheNormOverAllNodes) {
  max_norm_ = 3;
  Begin();
  for (int64_t step = 1; step <= 3; ++step) {
    ASSERT_NO_FATAL_FAILURE(TrainTo(step));
    double squares = 0;
    for (size_t p = 0; p < plan(0).params.size(); ++p) {
      for (int64_t i = 0; i < plan(0).params[p].numel; ++i) {
        const int param = static_cast<int>(p);
        squares += std::pow((GradientAt(0, step, param, i) + GradientAt(1, step, param, i)) / 2, 2);
      }
    }
    EXPECT_NEAR(factors_.back(), ClipFactor(std::sqrt(squares), max_norm_), 1e-12);
    EXPECT_LT(factors_.back(), 1);
  }
  ExpectWhole(3);
}

// Two optimizers of the daemon's, each with a part of the step.
TEST_P(JobNodesMuon, StepInAPartBesideAnotherOptimizer) {
  Begin();
  factors_ = {1, 1};
  for (int64_t step = 1; step <= 2; ++step) {
    for (int node = 0; node < 2; ++node) Backward(node, step);
    for (int node = 0; node < 2; ++node) Step(node, {0, 2}, /*part=*/true);
    for (int node = 0; node < 2; ++node) {
      ASSERT_TRUE(testing::PollUntil([&] { return StreamOf(node).Committed().parts() == 1; }, kPatience)) << Why(node);
    }
    for (int node = 0; node < 2; ++node) Step(node, {0, 1});
    ASSERT_NO_FATAL_FAILURE(Await(step));
  }
  ExpectWhole(2);
}

// The part of the matrices is made, and is put back on both nodes.
TEST_P(JobNodesMuon, ALostRankPutsAPartOfMatricesBack) {
  Begin();
  ASSERT_NO_FATAL_FAILURE(TrainTo(1));
  for (int node = 0; node < 2; ++node) Backward(node, 2);
  for (int node = 0; node < 2; ++node) Step(node, {0, 2}, /*part=*/true);
  for (int node = 0; node < 2; ++node) {
    ASSERT_TRUE(testing::PollUntil([&] { return StreamOf(node).Committed().parts() == 1; }, kPatience)) << Why(node);
  }
  Lose(1);
  ASSERT_TRUE(Gone(0) && Gone(1));
  for (int node = 0; node < 2; ++node) Attach(node);
  ExpectWhole(1);
  ASSERT_NO_FATAL_FAILURE(TrainTo(2));
  ExpectWhole(2);
}

// Decided by node 0, and unheard by node 1 until the link is there again.
TEST_P(JobNodesMuon, ADecidedStepOutlivesALostLinkOnBothNodes) {
  Begin();
  ASSERT_NO_FATAL_FAILURE(TrainTo(1));
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_decided() && to == 1; });
  for (int node = 0; node < 2; ++node) Backward(node, 2);
  for (int node = 0; node < 2; ++node) Step(node);
  ASSERT_TRUE(Until([&] { return job(1).nodes().promised(); }));
  ASSERT_TRUE(Until([&] {
    v1::Job described;
    (void)job(0).view().Describe(&described);
    return described.state() == v1::JOB_STATE_COMMITTING;
  }));
  wire_.SetUp(false);
  wire_.Drop(nullptr);
  wire_.SetUp(true);
  ASSERT_NO_FATAL_FAILURE(Await(2));
  factors_.push_back(1);
  ExpectWhole(2);
}

class JobCutMuon : public JobNodesMuon {};

TEST_P(JobCutMuon, RanksGatherTheWholeMatricesAgain) {
  Begin();
  ASSERT_NO_FATAL_FAILURE(TrainTo(1));
  for (int node = 0; node < 2; ++node) {
    v1::Command command;
    command.mutable_unshard()->set_phase(v1::PHASE_FORWARD);
    Send(node, command);
    ASSERT_TRUE(Until([&] { return job(node).sessions()[0].get()->handles[0].storage() == StorageState::kUnsharded; }))
        << Why(node);
    for (size_t p = 0; p < plan(node).params.size(); ++p) {
      const ParamPlan& of = plan(node).params[p];
      const FlatParamPlan& flat = plan(node).flat_params[static_cast<size_t>(of.flat_param)];
      const float* const values = SlabAt<float>(job(node).memory().pool(), flat.pool_offset_bytes) + of.offset;
      const Whole want = WholeOf(static_cast<int>(p), 1);
      EXPECT_EQ(std::vector<float>(values, values + of.numel), want.p) << of.fqn << " on node " << node;
    }
  }
}

std::string NameOf(const ::testing::TestParamInfo<std::tuple<v1::Strategy, v1::Layout>>& info) {
  return absl::StrCat(v1::Strategy_Name(std::get<0>(info.param)).substr(9),
                      std::get<1>(info.param) == v1::LAYOUT_FLAT ? "_FLAT" : "_DIM0");
}
const auto kLayouts = ::testing::Values(v1::LAYOUT_FLAT, v1::LAYOUT_DIM0);
const auto kCut = ::testing::Values(v1::STRATEGY_FULL_SHARD, v1::STRATEGY_SHARD_GRAD_OP);
const auto kReplicas = ::testing::Values(v1::STRATEGY_HYBRID_SHARD, v1::STRATEGY_NO_SHARD);

INSTANTIATE_TEST_SUITE_P(Replicas, JobNodesMuon, ::testing::Combine(kReplicas, kLayouts), NameOf);
INSTANTIATE_TEST_SUITE_P(Cut, JobNodesMuon, ::testing::Combine(kCut, kLayouts), NameOf);
INSTANTIATE_TEST_SUITE_P(Cut, JobCutMuon, ::testing::Combine(kCut, kLayouts), NameOf);

class JobNodesOneMatrix : public MuonOverNodes {
 protected:
  JobNodesOneMatrix() : MuonOverNodes(v1::STRATEGY_FULL_SHARD, v1::LAYOUT_DIM0, /*one_matrix=*/true) {}
};

TEST_F(JobNodesOneMatrix, ANodeWithoutAnyStepsBesideTheOther) {
  Begin();
  EXPECT_EQ(NodeRangeOf(plan(1), 0, 1).numel, 0);
  for (int64_t step = 1; step <= 3; ++step) ASSERT_NO_FATAL_FAILURE(TrainTo(step));
  ExpectWhole(3);
}

}  // namespace
}  // namespace shardd
