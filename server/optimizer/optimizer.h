#ifndef SHARDD_SERVER_OPTIMIZER_OPTIMIZER_H_
#define SHARDD_SERVER_OPTIMIZER_OPTIMIZER_H_

// The daemon's optimizer: turns one decided step into device work. Parameters without a gradient in this step (absent
// on all ranks) get no update, no decay and no step count, as PyTorch treats None.

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/plan.h"
#include "server/device/device.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

// Where a job's slabs begin; `parameters` is nullptr when there is no cast copy.
struct SlabPointers {
  char* shards = nullptr;
  char* parameters = nullptr;
  char* gradients = nullptr;
  char* optimizer = nullptr;
};

// What was decided for a step; constant from decision to commit.
struct DecidedStep {
  std::vector<v1::HyperParameters> groups;  // one per optimizer group
  double clip_factor = 1;
  std::vector<bool> present;         // by parameter: has a gradient
  std::vector<int64_t> step_counts;  // by parameter: before this step
};

// INVALID_ARGUMENT: wrong number of groups, or a value that PyTorch's optimizer refuses (negative lr, beta outside [0,
// 1), nesterov without momentum, momentum without a planned buffer), or a norm that is none; naming group, field and
// value.
absl::Status CheckHyperParameters(const ShardPlan& plan, const v1::Step& step);

// Operations that add `rank`'s work segments of present parameters to *result. Each gradient is counted once over all
// ranks, replicated and tied ones too; padding and frozen parameters never.
std::vector<DeviceOp> NormOps(const ShardPlan& plan, const SlabPointers& slabs, const std::vector<bool>& present,
                              int rank, Norm* result);

// Operations that update `rank`'s work segments: shards, every replica's copy of them and the cast copy, but
// where passes begin with copies. Adjacent
// segments with equal treatment are merged.
std::vector<DeviceOp> UpdateOps(const ShardPlan& plan, const SlabPointers& slabs, const DecidedStep& step, int rank);

// Operations that copy shards, and behind them the state that trainers keep, every replica's, into `kept`, or back, in
// `rank`'s work segments.
std::vector<DeviceOp> KeepOps(const ShardPlan& plan, const SlabPointers& slabs, char* kept, bool back, int rank);

// Operations that make what trainers have written into shards a version, in `rank`'s work segments: copy 0 is carried
// to every other replica's copy, and the copy that passes read made of it. Empty where there is neither.
std::vector<DeviceOp> CommitOps(const ShardPlan& plan, const SlabPointers& slabs, int rank);

// Operations that carry copy 0 of the gradients that are `written` (by parameter) to every other replica's copy, in
// `rank`'s work segments; empty where there are no copies.
std::vector<DeviceOp> GradientCopyOps(const ShardPlan& plan, const SlabPointers& slabs,
                                      const std::vector<bool>& written, int rank);

// The order of the norm that a step asks for: its norm_type, 2 where it says none.
double NormType(const v1::Step& step);

// PyTorch's rule: min(1, max_norm / (norm + 1e-6)); 1 when max_norm is 0.
double ClipFactor(double norm, double max_norm);

}  // namespace shardd

#endif  // SHARDD_SERVER_OPTIMIZER_OPTIMIZER_H_
