#ifndef SHARDD_TESTS_FUZZ_SPEC_INPUT_H_
#define SHARDD_TESTS_FUZZ_SPEC_INPUT_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "shardd/v1/model.pb.h"

namespace shardd::fuzz {

// Plans `spec`, whatever it is, and aborts the process where a promise of plan.h does not hold: a plan or an error with
// a text, the same both times, memory that is not negative, ranges within their slabs, every element owned once.
// Returns whether there was a plan.
bool CheckPlanOf(const v1::JobSpec& spec);

// Makes specs that are right, and changes that may make them wrong, out of numbers: random ones, or a fuzzer's bytes.
class SpecMaker {
 public:
  explicit SpecMaker(std::function<uint32_t()> random) : random_(std::move(random)) {}

  v1::JobSpec Make() {
    v1::JobSpec spec;
    spec.set_name("fuzz");
    spec.set_world_size(1 + Below(5));
    spec.mutable_config()->set_trainers_never_write(true);
    spec.mutable_config()->set_layout(static_cast<v1::Layout>(Below(3)));
    spec.mutable_config()->set_strategy(static_cast<v1::Strategy>(Below(6)));
    spec.mutable_config()->set_unshard_mode(static_cast<v1::UnshardMode>(Below(3)));
    if (spec.config().unshard_mode() != v1::UNSHARD_MODE_ZERO_COPY) {
      spec.mutable_config()->set_offload(static_cast<v1::Offload>(Below(3)));
    }
    spec.mutable_config()->mutable_optimizer()->set_kind(static_cast<v1::OptimizerKind>(Below(4)));
    if (spec.config().strategy() >= v1::STRATEGY_HYBRID_SHARD) MakeHybrid(spec);
    if (Below(3) == 0) spec.mutable_policy()->mutable_min_numel()->set_min_numel(Below(40));
    if (Below(3) == 0) spec.mutable_config()->mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
    const int modules = 1 + Below(6);
    for (int m = 0; m < modules; ++m) {
      v1::Module& module = *spec.mutable_tree()->add_modules();
      module.set_parent(m == 0 ? -1 : 0);
      if (m > 0) module.set_name(absl::StrCat("m", m));
      if (Below(2) == 0) module.set_mark(v1::MODULE_MARK_FULLY_SHARD);
      for (int p = Below(4); p > 0; --p) {
        v1::Parameter& parameter = *module.add_parameters();
        parameter.set_name(absl::StrCat("p", p));
        parameter.set_dtype(Below(4) == 0 ? v1::DTYPE_BFLOAT16 : v1::DTYPE_FLOAT32);
        parameter.set_requires_grad(Below(4) != 0);
        for (int d = Below(4); d > 0; --d) parameter.add_shape(1 + Below(9));
      }
    }
    return spec;
  }

  void Change(v1::JobSpec& spec) {
    v1::Module& module = *spec.mutable_tree()->mutable_modules(Below(spec.tree().modules_size()));
    v1::JobConfig& config = *spec.mutable_config();
    switch (Below(13)) {
      case 0:
        module.set_parent(static_cast<int>(Odd()));
        return;
      case 1:
        module.set_name(Below(2) == 0 ? "" : std::string("a\0.b", 4));
        return;
      case 2:
        spec.set_world_size(static_cast<int>(Odd()));
        return;
      case 3:
        module.set_mark(static_cast<v1::ModuleMark>(Below(7)));
        return;
      case 4:
        config.set_gradient_divide_factor(std::numeric_limits<double>::infinity());
        return;
      case 5:
        config.set_shard_group_size(static_cast<int>(Odd()));
        return;
      case 6:
        config.add_shard_groups()->add_ranks(static_cast<int>(Odd()));
        return;
      case 7:
        config.mutable_placement()->set_parameters(static_cast<v1::Spread>(Below(5)));
        return;
      case 8:
        config.mutable_placement()->set_gradients(static_cast<v1::Spread>(Below(5)));
        config.mutable_placement()->set_optimizer(static_cast<v1::Spread>(Below(5)));
        return;
      case 9:
        module.set_post_forward_shard_size(static_cast<int>(Odd()));
        return;
      default:
        break;
    }
    if (module.parameters().empty()) return;
    v1::Parameter& parameter = *module.mutable_parameters(Below(module.parameters_size()));
    switch (Below(4)) {
      case 0:
        parameter.add_shape(Odd());
        return;
      case 1:
        parameter.set_dtype(static_cast<v1::DType>(Below(13)));
        return;
      case 2:
        parameter.set_storage_id(1);
        return;
      default:
        parameter.set_name("p1");
        return;
    }
  }

  // Half of the ranks to a shard group, or one, and perhaps copies of what trainers write.
  void MakeHybrid(v1::JobSpec& spec) {
    v1::JobConfig& config = *spec.mutable_config();
    const int size = spec.world_size() % 2 == 0 && Below(2) == 0 ? spec.world_size() / 2 : 1;
    if (Below(2) == 0) {
      config.set_shard_group_size(size);
    } else {
      for (int rank = spec.world_size() - 1; rank >= 0; --rank) {
        const bool begins = (spec.world_size() - 1 - rank) % size == 0;
        (begins ? config.add_shard_groups() : config.mutable_shard_groups(config.shard_groups_size() - 1))
            ->add_ranks(rank);
      }
    }
    config.set_replica_copies(Below(2) == 0);
    config.set_trainers_never_write(Below(2) == 0);
    if (!config.trainers_never_write() && Below(2) == 0) {
      config.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
      config.mutable_optimizer()->set_trainer_states(Below(3));
    }
  }

  int Below(int limit) { return static_cast<int>(random_() % static_cast<uint32_t>(limit)); }

 private:
  // Numbers at which sizes go wrong.
  int64_t Odd() {
    const int64_t numbers[] = {0,
                               -1,
                               1,
                               3,
                               1 << 20,
                               int64_t{1} << 31,
                               int64_t{1} << 62,
                               std::numeric_limits<int64_t>::max(),
                               std::numeric_limits<int64_t>::min()};
    return numbers[Below(9)];
  }
  std::function<uint32_t()> random_;
};

}  // namespace shardd::fuzz

#endif  // SHARDD_TESTS_FUZZ_SPEC_INPUT_H_
