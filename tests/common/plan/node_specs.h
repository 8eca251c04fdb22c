#ifndef SHARDD_TESTS_COMMON_PLAN_NODE_SPECS_H_
#define SHARDD_TESTS_COMMON_PLAN_NODE_SPECS_H_

// Verbs for jobs over several nodes, beside those of spec_builder.h.

#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd {

inline void AddNodes(SpecBuilder* builder, int nodes) {
  for (int node = 0; node < nodes; ++node) {
    builder->config().mutable_nodes()->add_addresses(absl::StrCat("node", node, ":7000"));
  }
}

// The plan of a job as node `node` makes it.
inline ShardPlan PlanOn(SpecBuilder builder, int node) {
  absl::StatusOr<ShardPlan> plan = PlanShards(builder.spec(), node);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

// root(w) { a(w, bias, frozen) }: rows that nodes do not divide, and fewer rows than ranks. Returns a's index.
inline int AddUnevenParams(SpecBuilder* builder) {
  builder->Param(0, "w", {2048});
  const int a = builder->AddSharded(0, "a");
  builder->Param(a, "w", {67, 131});
  builder->Param(a, "bias", {3});
  builder->Param(a, "frozen", {1000, 5}, {.requires_grad = false});
  return a;
}

}  // namespace shardd

#endif  // SHARDD_TESTS_COMMON_PLAN_NODE_SPECS_H_
