#ifndef SHARDD_TESTS_SERVER_OPTIMIZER_WHOLE_PARAMS_FIXTURE_H_
#define SHARDD_TESTS_SERVER_OPTIMIZER_WHOLE_PARAMS_FIXTURE_H_

#include <memory>
#include <utility>
#include <vector>

#include "tests/server/optimizer/optimizer_fixture.h"

namespace shardd {

// A job in which one kind of optimizer updates whole parameters, and AdamW the rest: group 2 of the optimizer and
// group 1.
class WholeParamsTest : public OptimizerTest {
 protected:
  // What Model begins with. Its parameters have fewer rows than there are ranks, some of them.
  static SpecBuilder Model(int world_size, v1::Layout layout, DType param_dtype, v1::Strategy strategy) {
    SpecBuilder builder = OptimizerModel(world_size, layout, strategy, param_dtype, v1::OPTIMIZER_KIND_ADAMW);
    builder.Param(1, "wide", {2, 300});
    builder.Param(1, "one", {1, 5});
    return builder;
  }
  // `kind` updates the parameters in `whole`. Shard groups of HYBRID_SHARD are of two ranks, and each has a copy.
  template <typename Fqns>
  void StartWhole(SpecBuilder builder, v1::OptimizerKind kind, const Fqns& whole) {
    v1::OptimizerConfig& optimizer = *builder.config().mutable_optimizer();
    optimizer.mutable_groups(0)->set_kind(v1::OPTIMIZER_KIND_ADAMW);
    optimizer.mutable_groups(0)->add_fqns("scale");
    v1::OptimizerConfig::Group& group = *optimizer.add_groups();
    group.set_kind(kind);
    for (const char* fqn : whole) group.add_fqns(fqn);
    if (builder.config().strategy() == v1::STRATEGY_HYBRID_SHARD) {
      builder.config().set_shard_group_size(2);
      builder.config().set_replica_copies(true);
      builder.config().set_trainers_never_write(false);
    }
    Start(builder);
    workspace_ = std::make_unique<Bytes>(plan_.memory.workspace_bytes, 0xff);
    slabs_.workspace = workspace_->data();
  }
  // The first step is 1.
  virtual DecidedStep Decided(int step) const = 0;
  DecidedStep DecidedWith(const v1::HyperParameters& whole, int step) const {
    DecidedStep decided;
    decided.groups = {{}, AdamWHyper(0.01, 0.1), whole};
    decided.clip_factor = 0.5;
    decided.present = AllPresent();
    decided.step_counts.assign(plan_.params.size(), step - 1);
    return decided;
  }
  void RunSteps(int steps) {
    for (int step = 1; step <= steps; ++step) {
      WriteGradients(step, AllPresent());
      RunUpdate(Decided(step));
    }
  }
  // The first step, in which `fqn` has no gradient.
  void RunStepWithout(const char* fqn) {
    DecidedStep decided = Decided(1);
    decided.present[static_cast<size_t>(Param(fqn))] = false;
    WriteGradients(1, decided.present);
    RunUpdate(decided);
  }
  // A parameter in the second copy of the shards.
  std::vector<float> ShardInReplica(int param) const {
    const Place at(plan_, param);
    return ReadAs(shards_->data() + plan_.shards_stride_bytes + at.flat.shards_offset_bytes, at.flat.dtype, at.offset,
                  at.numel);
  }
  // The elements [first, first + numel) of a state, counted from where the parameter's begin.
  std::vector<float> StateAt(int param, int state, int64_t first, int64_t numel) const {
    const Place at(plan_, param);
    return ReadAs(optimizer_->data() + at.flat.optimizer_offset_bytes + state * at.flat.StateStrideBytes(),
                  v1::DTYPE_FLOAT32, at.offset + first, numel);
  }

  std::unique_ptr<Bytes> workspace_;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_OPTIMIZER_WHOLE_PARAMS_FIXTURE_H_
