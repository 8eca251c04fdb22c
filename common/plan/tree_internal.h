#ifndef SHARDD_COMMON_PLAN_TREE_INTERNAL_H_
#define SHARDD_COMMON_PLAN_TREE_INTERNAL_H_

// First stage of PlanShards: turns a hostile module tree into clean names and the managed parameters, each once.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "shardd/v1/model.pb.h"

namespace shardd::plan_internal {

// `"name"`, escaped and shortened, safe for errors and terminals.
std::string Quoted(absl::string_view name);

// A managed tensor at its first use in traversal order.
struct TreeParam {
  const v1::Parameter* declared = nullptr;  // points into the tree
  int module = 0;
  std::string fqn;
  int64_t numel = 0;
};

// A later use of a tied tensor.
struct TiedUse {
  int param = 0;  // index into ManagedTree::params
  int module = 0;
  std::string fqn;
};

struct ManagedTree {
  std::vector<std::string> fqns;   // clean, by module; "" for the root
  std::vector<bool> managed;       // by module: entered, so neither ignored, replicated nor already sharded
  std::vector<TreeParam> params;   // module traversal order
  std::vector<TiedUse> tied_uses;  // module traversal order
};

// Reads the tree, which must outlive the result. INVALID_ARGUMENT names module or parameter. A tensor that is ignored
// (replicated, already sharded) under one name is so under all its names.
absl::StatusOr<ManagedTree> ReadTree(const v1::ModuleTree& tree);

// Checks a job's name, which becomes part of paths: 1 to 128 characters of [A-Za-z0-9._-], neither "." nor "..".
absl::Status CheckJobName(absl::string_view name);

}  // namespace shardd::plan_internal

#endif  // SHARDD_COMMON_PLAN_TREE_INTERNAL_H_
