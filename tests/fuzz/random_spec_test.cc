// The same check as plan_fuzz.cc on specs that are nearly right: a good one with a few random changes. Fixed seeds.

#include <limits>
#include <random>

#include "absl/strings/str_cat.h"
#include "google/protobuf/stubs/logging.h"
#include "gtest/gtest.h"
#include "tests/fuzz/spec_input.h"

namespace shardd::fuzz {
namespace {

class Mutator {
 public:
  explicit Mutator(uint32_t seed) : random_(seed) {}

  v1::JobSpec Make() {
    v1::JobSpec spec;
    spec.set_name("fuzz");
    spec.set_world_size(1 + Below(5));
    spec.mutable_config()->set_trainers_never_write(true);
    spec.mutable_config()->set_layout(static_cast<v1::Layout>(Below(3)));
    spec.mutable_config()->set_strategy(static_cast<v1::Strategy>(Below(4)));
    spec.mutable_config()->set_unshard_mode(static_cast<v1::UnshardMode>(Below(3)));
    spec.mutable_config()->mutable_optimizer()->set_kind(static_cast<v1::OptimizerKind>(Below(4)));
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
    switch (Below(8)) {
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
        spec.mutable_config()->set_gradient_divide_factor(std::numeric_limits<double>::infinity());
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
  std::mt19937 random_;
};

TEST(RandomSpec, GivesAPlanThatCoversEveryElementOnceOrAnError) {
  int planned = 0;
  for (uint32_t seed = 0; seed < 4000; ++seed) {
    SCOPED_TRACE(seed);
    Mutator mutator(seed);
    v1::JobSpec spec = mutator.Make();
    for (int changes = mutator.Below(3); changes > 0; --changes) mutator.Change(spec);
    planned += CheckPlanOf(spec) ? 1 : 0;
  }
  EXPECT_GT(planned, 400);  // both outcomes occur often, or this checks nothing
  EXPECT_LT(planned, 3900);
}

TEST(RandomSpec, BytesThatAreASpecByChanceAreAPlanOrAnError) {
  const google::protobuf::LogSilencer quiet;  // names that are no UTF-8
  std::mt19937 random(7);
  for (int round = 0; round < 4000; ++round) {
    Mutator mutator(static_cast<uint32_t>(round));
    std::string bytes = mutator.Make().SerializeAsString();
    for (int flips = 1 + round % 5; flips > 0; --flips) bytes[random() % bytes.size()] = static_cast<char>(random());
    v1::JobSpec spec;
    if (spec.ParseFromString(bytes)) CheckPlanOf(spec);
  }
}

}  // namespace
}  // namespace shardd::fuzz
