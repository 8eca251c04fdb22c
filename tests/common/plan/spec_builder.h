#ifndef SHARDD_TESTS_COMMON_PLAN_SPEC_BUILDER_H_
#define SHARDD_TESTS_COMMON_PLAN_SPEC_BUILDER_H_

// Verbs for writing job specs in tests, and matchers on the statuses that come back.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/fqn/fqn.h"
#include "common/plan/plan.h"

namespace shardd {

struct ParamOptions {
  DType dtype = v1::DTYPE_FLOAT32;
  bool requires_grad = true;
  uint64_t storage_id = 0;
  bool already_sharded = false;
};

class SpecBuilder {
 public:
  explicit SpecBuilder(int world_size = 2) {
    spec_.set_name("job");
    spec_.set_world_size(world_size);
    config().set_trainers_never_write(true);
    v1::Module* root = spec_.mutable_tree()->add_modules();
    root->set_parent(-1);
    root->set_class_name("Model");
  }

  v1::JobSpec& spec() { return spec_; }
  v1::JobConfig& config() { return *spec_.mutable_config(); }
  v1::Module& module(int index) { return *spec_.mutable_tree()->mutable_modules(index); }

  // Modules must be added in depth-first pre-order. Returns the module's index.
  int Add(int parent, const std::string& child, const std::string& class_name = "Block",
          v1::ModuleMark mark = v1::MODULE_MARK_UNSPECIFIED) {
    v1::Module* added = spec_.mutable_tree()->add_modules();
    added->set_name(JoinFqn(module(parent).name(), child));
    added->set_parent(parent);
    added->set_class_name(class_name);
    added->set_mark(mark);
    return spec_.tree().modules_size() - 1;
  }
  int AddSharded(int parent, const std::string& child) {
    return Add(parent, child, "Block", v1::MODULE_MARK_FULLY_SHARD);
  }

  v1::Parameter& Param(int index, const std::string& name, const std::vector<int64_t>& shape,
                       const ParamOptions& options = {}) {
    v1::Parameter* param = module(index).add_parameters();
    param->set_name(name);
    for (int64_t extent : shape) {
      param->add_shape(extent);
    }
    param->set_dtype(options.dtype);
    param->set_requires_grad(options.requires_grad);
    param->set_storage_id(options.storage_id);
    param->set_already_sharded(options.already_sharded);
    return *param;
  }

  ShardPlan Plan() const {
    absl::StatusOr<ShardPlan> plan = PlanShards(spec_);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan.ok() ? *std::move(plan) : ShardPlan{};
  }

 private:
  v1::JobSpec spec_;
};

// "<group>: <fqn>, <fqn>" per group, in order.
inline std::vector<std::string> GroupMembers(const ShardPlan& plan) {
  std::vector<std::string> text;
  for (const GroupPlan& group : plan.groups) {
    std::string line = group.name + ":";
    for (int p : group.params) {
      absl::StrAppend(&line, " ", plan.params[p].fqn);
    }
    text.push_back(line);
  }
  return text;
}

inline ::testing::AssertionResult Refused(const v1::JobSpec& spec, absl::StatusCode code,
                                          const std::vector<std::string>& fragments) {
  const absl::StatusOr<ShardPlan> plan = PlanShards(spec);
  if (plan.ok()) {
    return ::testing::AssertionFailure() << "accepted";
  }
  if (plan.status().code() != code) {
    return ::testing::AssertionFailure() << "wrong code: " << plan.status();
  }
  for (const std::string& fragment : fragments) {
    if (plan.status().message().find(fragment) == absl::string_view::npos) {
      return ::testing::AssertionFailure() << "no '" << fragment << "' in: " << plan.status();
    }
  }
  return ::testing::AssertionSuccess();
}

inline ::testing::AssertionResult Invalid(const v1::JobSpec& spec, const std::vector<std::string>& fragments) {
  return Refused(spec, absl::StatusCode::kInvalidArgument, fragments);
}

}  // namespace shardd

#endif  // SHARDD_TESTS_COMMON_PLAN_SPEC_BUILDER_H_
