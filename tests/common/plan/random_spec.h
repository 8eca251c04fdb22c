#ifndef SHARDD_TESTS_COMMON_PLAN_RANDOM_SPEC_H_
#define SHARDD_TESTS_COMMON_PLAN_RANDOM_SPEC_H_

#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "tests/common/plan/spec_builder.h"

namespace shardd {

// Random job specs that PlanShards must accept: nested modules with random marks, ties, dtypes, shapes, policies and
// configurations. The same seed gives the same spec.
class RandomSpec {
 public:
  explicit RandomSpec(uint32_t seed) : random_(seed), builder_(1 + Below(9)) {
    // Something is always left to manage.
    builder_.Param(0, "anchor", RandomShape());
    AddParams(0);
    AddChildren(0, 0);
    Configure();
  }

  const v1::JobSpec& spec() { return builder_.spec(); }

  // Divisors of the shard group's size for some of the fully sharded modules, where no override contradicts them.
  void CutAfterForward() {
    const ShardPlan plan = builder_.Plan();
    for (const GroupPlan& group : plan.groups) {
      int size = Below(plan.placement.shard_world_size + 1);
      while (size > 0 && plan.placement.shard_world_size % size != 0) --size;
      v1::Module& module = builder_.module(group.module);
      const bool contradicts = module.reshard_after_forward() == (size == 1 ? v1::OVERRIDE_YES : v1::OVERRIDE_NO);
      if (Below(2) == 0 && !contradicts) module.set_post_forward_shard_size(size);
    }
  }

  // A precision of their own for some of the fully sharded modules.
  void MixPrecision() {
    constexpr v1::DType kDTypes[] = {v1::DTYPE_UNSPECIFIED, v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16};
    const ShardPlan plan = builder_.Plan();
    for (const GroupPlan& group : plan.groups) {
      if (Below(3) != 0) continue;
      v1::MixedPrecision& precision = *builder_.module(group.module).mutable_mixed_precision();
      precision.set_param_dtype(kDTypes[Below(4)]);
      precision.set_reduce_dtype(kDTypes[Below(4)]);
      precision.set_keep_low_precision_grads(Below(2) == 0);
    }
  }

 private:
  int Below(int bound) { return static_cast<int>(random_() % static_cast<uint32_t>(bound)); }

  std::vector<int64_t> RandomShape() {
    std::vector<int64_t> shape;
    for (int d = Below(4); d > 0; --d) {
      shape.push_back(1 + Below(11));
    }
    return shape;
  }

  void AddParams(int module) {
    for (int i = Below(4); i > 0; --i) {
      ParamOptions options;
      std::vector<int64_t> shape = RandomShape();
      switch (Below(8)) {
        case 0:
          options = {.dtype = v1::DTYPE_BFLOAT16};
          break;
        case 1:
          options = {.dtype = v1::DTYPE_INT64, .requires_grad = false};
          break;
        case 2:
          options = {.requires_grad = false};
          break;
        case 3:  // one of three tensors that are tied all over the tree
          options = {.storage_id = 1 + static_cast<uint64_t>(Below(3))};
          shape = {4, 3};
          break;
        case 4:
          options = {.already_sharded = Below(2) == 0};
          break;
        default:
          break;
      }
      builder_.Param(module, absl::StrCat("p", i), shape, options);
    }
  }

  void AddChildren(int parent, int depth) {
    for (int i = depth < 4 ? Below(4) : 0; i > 0; --i) {
      v1::ModuleMark mark = v1::MODULE_MARK_UNSPECIFIED;
      switch (Below(10)) {
        case 0:
          mark = v1::MODULE_MARK_IGNORED;
          break;
        case 1:
          mark = v1::MODULE_MARK_REPLICATE;
          break;
        case 2:
        case 3:
        case 4:
          mark = v1::MODULE_MARK_FULLY_SHARD;
          break;
        default:
          break;
      }
      const int child = builder_.Add(parent, absl::StrCat("m", i), absl::StrCat("Class", Below(3)), mark);
      builder_.module(child).set_reshard_after_forward(static_cast<v1::Override>(Below(3)));
      AddParams(child);
      AddChildren(child, depth + 1);
    }
  }

  void Configure() {
    v1::JobConfig& config = builder_.config();
    config.set_layout(Below(2) == 0 ? v1::LAYOUT_FLAT : v1::LAYOUT_DIM0);
    config.set_strategy(static_cast<v1::Strategy>(Below(6)));
    Place(config);
    config.set_unshard_mode(static_cast<v1::UnshardMode>(Below(3)));
    if (config.unshard_mode() != v1::UNSHARD_MODE_ZERO_COPY) config.set_offload(static_cast<v1::Offload>(Below(3)));
    if (Below(2) == 0) {
      config.mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
    }
    config.mutable_optimizer()->set_kind(static_cast<v1::OptimizerKind>(Below(4)));
    config.set_trainers_never_write(Below(2) == 0);
    if (!config.trainers_never_write() && Below(2) == 0) {
      config.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
      config.mutable_optimizer()->set_trainer_states(Below(3));
    }
    config.set_pass_copies(!config.trainers_never_write() && Below(2) == 0);
    switch (Below(4)) {
      case 0:
        builder_.spec().mutable_policy()->mutable_classes()->add_class_names("Class1");
        break;
      case 1:
        builder_.spec().mutable_policy()->mutable_min_numel()->set_min_numel(Below(200));
        break;
      case 2:
        builder_.spec().mutable_policy()->mutable_always();
        break;
      default:
        break;
    }
  }

  // A split of the world where the strategy has one, neighbours or any; and a placement finer than the strategy's.
  void Place(v1::JobConfig& config) {
    const int world_size = builder_.spec().world_size();
    if (config.strategy() == v1::STRATEGY_HYBRID_SHARD || config.strategy() == v1::STRATEGY_HYBRID_SHARD_ZERO2) {
      int size = 1 + Below(world_size);
      while (world_size % size != 0) --size;
      std::vector<int> ranks(static_cast<size_t>(world_size));
      std::iota(ranks.begin(), ranks.end(), 0);
      switch (Below(3)) {
        case 0:
          break;  // all ranks of the node
        case 1:
          config.set_shard_group_size(size);
          break;
        default:
          for (size_t i = ranks.size() - 1; i > 0; --i) std::swap(ranks[i], ranks[Below(static_cast<int>(i) + 1)]);
          for (int i = 0; i < world_size; ++i) {
            (i % size == 0 ? config.add_shard_groups() : config.mutable_shard_groups(i / size))
                ->add_ranks(ranks[static_cast<size_t>(i)]);
          }
      }
      config.set_replica_copies(Below(2) == 0);
    }
    if (Below(3) == 0) {
      const int parameters = 1 + Below(3);
      const int gradients = parameters + Below(4 - parameters);
      config.mutable_placement()->set_parameters(static_cast<v1::Spread>(parameters));
      config.mutable_placement()->set_gradients(static_cast<v1::Spread>(gradients));
      config.mutable_placement()->set_optimizer(static_cast<v1::Spread>(gradients + Below(4 - gradients)));
    }
  }

  std::mt19937 random_;
  SpecBuilder builder_;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_COMMON_PLAN_RANDOM_SPEC_H_
