#ifndef SHARDD_SERVER_OPTIMIZER_OPTIMIZER_H_
#define SHARDD_SERVER_OPTIMIZER_OPTIMIZER_H_

// The daemon's optimizer: turns one decided step into device work. A parameter for which no rank has a gradient gets no
// update, no decay and no step count, like PyTorch's None.

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/plan.h"
#include "server/device/device_op.h"
#include "server/optimizer/decided_step.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

// How many groups of hyperparameters a step brings: the config's and the default one; 0: no parameter changes by it.
int OptimizerGroups(const ShardPlan& plan);

// INVALID_ARGUMENT: the number of groups is wrong, PyTorch's optimizer would refuse a value (negative lr, beta outside
// [0, 1), nesterov without momentum), there is momentum without a planned buffer, or the norm type is invalid. Names
// group, field and value.
absl::Status CheckHyperParameters(const ShardPlan& plan, const v1::Step& step);

// By parameter: it has a gradient (`present`), and the step updates it: no optimizer group that it leaves, or that has
// no optimizer.
std::vector<bool> UpdatedBy(const ShardPlan& plan, const v1::Step& step, const std::vector<bool>& present);

// By parameter: the step leaves it as it is, with its gradient (v1::Step.left_groups).
bool Leaves(const v1::Step& step, int optimizer_group);

// Operations that add `rank`'s work segments of present parameters to *result. Over all ranks each gradient counts
// once, replicated and tied ones too; padding and frozen parameters do not count.
std::vector<DeviceOp> NormOps(const ShardPlan& plan, const SlabPointers& slabs, const std::vector<bool>& present,
                              int rank, Norm* result);

// Operations that update `rank`'s work segments: the shards, all replicas' copies of them, and the cast copy unless
// passes begin with copies. Adjacent segments with equal treatment are merged. Whole matrices
// (common/plan/whole_params.h) are one rank's, in whichever work segments they lie. `logged`: where the rank's updates
// write what they are about to change.
std::vector<DeviceOp> UpdateOps(const ShardPlan& plan, const SlabPointers& slabs, const DecidedStep& step, int rank,
                                Logged logged = {});

// What of a snapshot is copied.
enum class KeptPart {
  kAll,
  // What has to be copied before trainers may store again: shards of which passes read no copy as they are stored.
  kWithPass,
  // The rest: other shards, from the copies that passes read, and the state that trainers keep, into which they must
  // not store meanwhile.
  kBehindPass,
  // The state that trainers keep, into the snapshot or back; back also the shards, from the copies that passes read,
  // which are the snapshot's shards. REQUIRES: PassesReadWhatIsStored.
  kStates,
};

// Operations that copy shards, followed by the state that trainers keep, of every replica, into the snapshot `kept`, or
// back, in `rank`'s work segments. REQUIRES: `part` is kAll or kStates, or not `back`.
std::vector<DeviceOp> KeepOps(const ShardPlan& plan, const SlabPointers& slabs, char* kept, bool back, int rank,
                              KeptPart part = KeptPart::kAll);

// Operations that make trainers' writes to shards a version, in `rank`'s work segments: they copy copy 0 to every other
// replica, and make the copy that passes read. Empty if there is neither.
// `updated`: by parameter, what UpdateOps of the same work update, which copy whole matrices themselves; empty:
// nothing.
std::vector<DeviceOp> CommitOps(const ShardPlan& plan, const SlabPointers& slabs, int rank,
                                const std::vector<bool>& updated = {});

// Operations that copy copy 0 of the `written` gradients (by parameter) to every other replica, in `rank`'s work
// segments; empty if there are no copies.
std::vector<DeviceOp> GradientCopyOps(const ShardPlan& plan, const SlabPointers& slabs,
                                      const std::vector<bool>& written, int rank);

// The order of the norm for a step: its norm_type, or 2 if that is unset.
double NormType(const v1::Step& step);

// PyTorch's rule: min(1, max_norm / (norm + 1e-6)); 1 if max_norm is 0.
double ClipFactor(double norm, double max_norm);

}  // namespace shardd

#endif  // SHARDD_SERVER_OPTIMIZER_OPTIMIZER_H_
