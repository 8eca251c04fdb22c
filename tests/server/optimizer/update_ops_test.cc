// A step over every rank's work gives what the plain kernel gives on whole parameters.

#include "tests/server/optimizer/optimizer_fixture.h"

namespace shardd {
namespace {

constexpr DType kFp32 = v1::DTYPE_FLOAT32;

// An unsharded parameter with its state.
struct Whole {
  std::vector<float> p, m, v;
  int64_t steps = 0;
};

class UpdateOpsTest : public OptimizerTest {
 protected:
  void StartBoth(const SpecBuilder& builder) {
    Start(builder);
    wholes_.clear();
    for (size_t p = 0; p < plan_.params.size(); ++p) {
      Whole whole;
      whole.p = ParamValues(plan_, static_cast<int>(p), 1);
      whole.m.resize(whole.p.size());
      whole.v.resize(whole.p.size());
      wholes_.push_back(std::move(whole));
    }
  }
  // One step in both worlds.
  void Step(int seed, const std::vector<bool>& present, std::vector<v1::HyperParameters> groups, double clip = 1) {
    WriteGradients(seed, present);
    DecidedStep step;
    step.groups = groups;
    step.clip_factor = clip;
    step.present = present;
    for (const Whole& whole : wholes_) step.step_counts.push_back(whole.steps);
    RunUpdate(step);
    for (size_t p = 0; p < wholes_.size(); ++p) {
      if (present[p]) StepWhole(static_cast<int>(p), seed, groups, clip);
    }
  }
  void StepWhole(int p, int seed, const std::vector<v1::HyperParameters>& groups, double clip) {
    Whole& whole = wholes_[p];
    const v1::HyperParameters& h = groups[plan_.params[p].optimizer_group];
    const std::vector<float> g = ParamValues(plan_, p, seed);
    const int64_t n = plan_.params[p].numel;
    ++whole.steps;
    if (plan_.config.optimizer().kind() == v1::OPTIMIZER_KIND_ADAMW) {
      AdamWUpdate({h.lr(), h.beta1(), h.beta2(), h.eps(), h.weight_decay(), whole.steps, clip}, whole.p.data(), kFp32,
                  g.data(), whole.m.data(), whole.v.data(), nullptr, kFp32, n);
    } else {
      SgdUpdate({h.lr(), h.momentum(), h.dampening(), h.weight_decay(), h.nesterov(), whole.steps == 1, clip},
                whole.p.data(), kFp32, g.data(), h.momentum() == 0 ? nullptr : whole.m.data(), nullptr, kFp32, n);
    }
  }
  void ExpectEqualBits() {
    for (size_t p = 0; p < wholes_.size(); ++p) {
      for (int copy = 0; copy < plan_.shard_copies; ++copy) {
        EXPECT_EQ(ShardCopy(static_cast<int>(p), copy), wholes_[p].p) << plan_.params[p].fqn << " copy " << copy;
      }
    }
  }
  std::vector<float> ShardCopy(int param, int copy) const {
    const Place at(plan_, param);
    return ReadAs(shards_->data() + copy * plan_.shards_stride_bytes + at.flat.shards_offset_bytes, at.flat.dtype,
                  at.offset, at.numel);
  }

  // Two shard groups, each with a copy of the shards.
  static void MakeReplicas(SpecBuilder& builder, int shard_group_size) {
    builder.config().set_shard_group_size(shard_group_size);
    builder.config().set_replica_copies(true);
    builder.config().set_trainers_never_write(false);
  }

  std::vector<Whole> wholes_;
};

TEST_F(UpdateOpsTest, OptimizersEqualTheUnshardedUpdateInEveryPlan) {
  for (v1::OptimizerKind kind : {v1::OPTIMIZER_KIND_ADAMW, v1::OPTIMIZER_KIND_SGD}) {
    for (v1::Layout layout : {v1::LAYOUT_FLAT, v1::LAYOUT_DIM0}) {
      for (v1::Strategy strategy : {v1::STRATEGY_FULL_SHARD, v1::STRATEGY_NO_SHARD, v1::STRATEGY_HYBRID_SHARD}) {
        for (int world_size : {1, 2, 3, 4, 7}) {
          const bool hybrid = strategy == v1::STRATEGY_HYBRID_SHARD;
          if (hybrid && world_size % 2 != 0) continue;
          SCOPED_TRACE(absl::StrCat(v1::OptimizerKind_Name(kind), " ", v1::Layout_Name(layout), " ",
                                    v1::Strategy_Name(strategy), " ranks: ", world_size));
          SpecBuilder builder = OptimizerModel(world_size, layout, strategy, v1::DTYPE_UNSPECIFIED, kind);
          if (hybrid) MakeReplicas(builder, world_size / 2);
          StartBoth(builder);
          ASSERT_EQ(plan_.shard_copies, hybrid ? 2 : 1);
          for (int rank = 0; rank < world_size; ++rank) Run(CommitOps(plan_, slabs_, rank));
          const auto hyper = kind == v1::OPTIMIZER_KIND_ADAMW
                                 ? std::vector<v1::HyperParameters>{AdamWHyper(0.01, 0.1), AdamWHyper(0.02, 0)}
                                 : std::vector<v1::HyperParameters>{SgdHyper(0.01, 0.9), SgdHyper(0.02, 0.5)};
          for (int step = 0; step < 4; ++step) Step(10 + step, AllPresent(), hyper, step == 2 ? 0.25 : 1);
          ExpectEqualBits();
        }
      }
    }
  }
}

TEST_F(UpdateOpsTest, AParameterWithoutGradientGetsNoUpdateDecayOrCount) {
  StartBoth(
      OptimizerModel(3, v1::LAYOUT_FLAT, v1::STRATEGY_FULL_SHARD, v1::DTYPE_UNSPECIFIED, v1::OPTIMIZER_KIND_ADAMW));
  const std::vector<v1::HyperParameters> hyper = {AdamWHyper(0.01, 0.5), AdamWHyper(0.02, 0.5)};
  std::vector<bool> present = AllPresent();
  present[Param("a.norm")] = false;
  Step(10, present, hyper);
  EXPECT_EQ(Shard(Param("a.norm")), ParamValues(plan_, Param("a.norm"), 1));
  Step(11, AllPresent(), hyper);  // its first step, the others' second
  present[Param("a.norm")] = true;
  present[Param("a.weight")] = false;
  Step(12, present, hyper);
  ExpectEqualBits();
}

TEST_F(UpdateOpsTest, FrozenParametersAndPaddingKeepTheirBytes) {
  StartBoth(OptimizerModel(4, v1::LAYOUT_FLAT, v1::STRATEGY_FULL_SHARD, v1::DTYPE_BFLOAT16, v1::OPTIMIZER_KIND_ADAMW));
  Bytes shards = shards_->Copy();
  Bytes parameters = parameters_->Copy();
  Bytes optimizer = optimizer_->Copy();
  Step(10, AllPresent(), {AdamWHyper(0.01, 0.1), AdamWHyper(0.02, 0)});
  // Everything that belongs to a trainable parameter is taken over; what is left must be equal.
  for (size_t p = 0; p < plan_.params.size(); ++p) {
    if (!plan_.params[p].requires_grad) continue;
    const Place at(plan_, static_cast<int>(p));
    WriteShard(plan_, shards, static_cast<int>(p), Shard(static_cast<int>(p)));
    WriteAs(CastCopy(static_cast<int>(p)), at.flat.unsharded_dtype, parameters.data() + at.flat.params_offset_bytes,
            at.offset);
    for (int state = 0; state < 2; ++state) {
      const int64_t base = at.flat.optimizer_offset_bytes + state * at.flat.StateStrideBytes();
      WriteAs(ReadAs(optimizer_->data() + base, kFp32, at.offset, at.numel), kFp32, optimizer.data() + base, at.offset);
    }
  }
  EXPECT_TRUE(*shards_ == shards);
  EXPECT_TRUE(*parameters_ == parameters);
  EXPECT_TRUE(*optimizer_ == optimizer);
}

TEST_F(UpdateOpsTest, TheCastCopyFollowsTheShards) {
  for (DType dtype : {v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16}) {
    StartBoth(OptimizerModel(3, v1::LAYOUT_DIM0, v1::STRATEGY_FULL_SHARD, dtype, v1::OPTIMIZER_KIND_SGD));
    ASSERT_GT(plan_.memory.parameters_bytes, 0);
    for (int rank = 0; rank < 3; ++rank) Run(CommitOps(plan_, slabs_, rank));
    const auto expect_copy = [&] {
      for (size_t p = 0; p < plan_.params.size(); ++p) {
        const std::vector<float> shard = Shard(static_cast<int>(p));
        std::vector<uint16_t> narrow(shard.size());
        std::vector<float> want(shard.size());
        Cast(shard.data(), kFp32, narrow.data(), dtype, static_cast<int64_t>(shard.size()));
        Cast(narrow.data(), dtype, want.data(), kFp32, static_cast<int64_t>(shard.size()));
        EXPECT_EQ(CastCopy(static_cast<int>(p)), want) << plan_.params[p].fqn;
      }
    };
    expect_copy();
    Step(10, AllPresent(), {SgdHyper(0.01, 0.9), SgdHyper(0.02, 0)});
    expect_copy();
    ExpectEqualBits();
  }
}

TEST_F(UpdateOpsTest, ACommitBringsTheFirstReplicasShardsToEveryCopy) {
  for (v1::Layout layout : {v1::LAYOUT_FLAT, v1::LAYOUT_DIM0}) {
    SpecBuilder builder =
        OptimizerModel(6, layout, v1::STRATEGY_HYBRID_SHARD, v1::DTYPE_BFLOAT16, v1::OPTIMIZER_KIND_ADAMW);
    MakeReplicas(builder, 2);
    StartBoth(builder);
    ASSERT_EQ(plan_.shard_copies, 3);
    Bytes want(plan_.memory.shards_bytes);
    for (int copy = 0; copy < 3; ++copy) {  // between parameters both are NaN
      std::memcpy(want.data() + copy * plan_.shards_stride_bytes, shards_->data(), plan_.shards_stride_bytes);
    }
    EXPECT_FALSE(*shards_ == want);
    for (int rank = 0; rank < 6; ++rank) Run(CommitOps(plan_, slabs_, rank));
    EXPECT_TRUE(*shards_ == want) << "frozen parameters too";
    EXPECT_EQ(CastCopy(Param("a.gain")), Shard(Param("a.gain")));
  }
}

TEST_F(UpdateOpsTest, OnlyWrittenGradientsAreCarriedToEveryCopy) {
  SpecBuilder builder =
      OptimizerModel(4, v1::LAYOUT_DIM0, v1::STRATEGY_HYBRID_SHARD, v1::DTYPE_UNSPECIFIED, v1::OPTIMIZER_KIND_ADAMW);
  MakeReplicas(builder, 2);
  Start(builder);
  WriteGradients(10, AllPresent());
  std::vector<bool> written(plan_.params.size(), false);
  written[Param("a.norm")] = true;
  for (int rank = 0; rank < 4; ++rank) Run(GradientCopyOps(plan_, slabs_, written, rank));
  Bytes want(plan_.gradients_stride_bytes, 0xff);
  WriteGradient(plan_, want, Param("a.norm"), ParamValues(plan_, Param("a.norm"), 10));
  EXPECT_EQ(std::memcmp(gradients_->data() + plan_.gradients_stride_bytes, want.data(),
                        static_cast<size_t>(plan_.gradients_stride_bytes)),
            0);
}

TEST_F(UpdateOpsTest, WithoutACastCopyThereIsNothingToCast) {
  StartBoth(
      OptimizerModel(2, v1::LAYOUT_FLAT, v1::STRATEGY_FULL_SHARD, v1::DTYPE_UNSPECIFIED, v1::OPTIMIZER_KIND_ADAMW));
  EXPECT_TRUE(CommitOps(plan_, slabs_, 0).empty());
  EXPECT_TRUE(GradientCopyOps(plan_, slabs_, AllPresent(), 0).empty());
}

TEST_F(UpdateOpsTest, TouchingParametersOfEqualTreatmentAreOneOperation) {
  SpecBuilder builder(1);
  builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  for (int i = 0; i < 4; ++i) builder.Param(0, absl::StrCat("p", i), {64});
  builder.config().mutable_optimizer()->add_groups()->add_fqns("p3");
  Start(builder);
  DecidedStep step;
  step.groups = {AdamWHyper(0.1, 0), AdamWHyper(0.2, 0)};
  step.present = {true, true, true, true};
  step.step_counts = {0, 0, 0, 0};
  const auto numels = [&] {
    std::vector<int64_t> result;
    for (const DeviceOp& op : UpdateOps(plan_, slabs_, step, 0)) result.push_back(std::get<AdamWOp>(op).numel);
    return result;
  };
  EXPECT_EQ(numels(), (std::vector<int64_t>{192, 64})) << "another optimizer group";
  step.step_counts = {0, 5, 0, 0};
  EXPECT_EQ(numels(), (std::vector<int64_t>{64, 64, 64, 64})) << "another step count";
  step.step_counts = {0, 0, 0, 0};
  step.present = {true, false, true, true};
  EXPECT_EQ(numels(), (std::vector<int64_t>{64, 64, 64})) << "one absent";
  EXPECT_EQ(NormOps(plan_, slabs_, {true, true, true, true}, 0, nullptr).size(), 1u);
}

TEST_F(UpdateOpsTest, WithoutAnOptimizerThereIsNothingToUpdate) {
  SpecBuilder builder(1);
  builder.Param(0, "p", {64});
  Start(builder);
  EXPECT_TRUE(UpdateOps(plan_, slabs_, {{}, 1, {true}, {0}}, 0).empty());
}

TEST_F(UpdateOpsTest, TheNormCountsEachGradientOnceAndPaddingNever) {
  for (v1::Layout layout : {v1::LAYOUT_FLAT, v1::LAYOUT_DIM0}) {
    for (v1::Strategy strategy : {v1::STRATEGY_FULL_SHARD, v1::STRATEGY_NO_SHARD}) {
      for (int world_size : {1, 3, 4}) {
        Start(OptimizerModel(world_size, layout, strategy, v1::DTYPE_UNSPECIFIED, v1::OPTIMIZER_KIND_ADAMW));
        std::vector<bool> present = AllPresent();
        present[Param("a.norm")] = false;  // stays NaN
        WriteGradients(3, present);
        for (double order : {1.0, 1.5, 2.0, 3.0, 7.25, double{INFINITY}}) {
          double sum = 0, largest = 0;
          for (size_t p = 0; p < present.size(); ++p) {
            if (!present[p]) continue;
            for (float x : ParamValues(plan_, static_cast<int>(p), 3)) {
              sum += std::pow(std::abs(double{x}), order);
              largest = std::max(largest, std::abs(double{x}));
            }
          }
          const double want = std::isinf(order) ? largest : std::pow(sum, 1 / order);
          EXPECT_NEAR(GradientNorm(present, order), want, 1e-12 * want)
              << v1::Layout_Name(layout) << " ranks: " << world_size << " order: " << order;
        }
      }
    }
  }
}

TEST_F(UpdateOpsTest, ANonFiniteGradientShowsInTheNorm) {
  Start(OptimizerModel(2, v1::LAYOUT_FLAT, v1::STRATEGY_FULL_SHARD, v1::DTYPE_UNSPECIFIED, v1::OPTIMIZER_KIND_ADAMW));
  WriteGradients(3, AllPresent());
  std::vector<float> bad = ParamValues(plan_, Param("a.gain"), 3);
  bad[4] = INFINITY;
  WriteGradient(plan_, *gradients_, Param("a.gain"), bad);
  for (double order : {1.0, 2.0, 2.5, 3.0, double{INFINITY}}) {
    EXPECT_FALSE(std::isfinite(GradientNorm(AllPresent(), order))) << order;
  }
}

}  // namespace
}  // namespace shardd
