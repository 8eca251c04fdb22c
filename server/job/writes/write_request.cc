#include "server/job/writes/write_request.h"

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "common/plan/whole_params.h"
#include "common/shm/ring.h"
#include "common/tensor/dtype.h"
#include "server/session/rank_command.h"

namespace shardd {
namespace {

// States of the optimizer that the job has of the parameter.
int StatesOf(const ShardPlan& plan, const ParamPlan& param) {
  const bool updates = plan.config.optimizer().kind() != v1::OPTIMIZER_KIND_TRAINER;
  const bool has_them =
      updates && param.requires_grad && plan.flat_params[param.flat_param].optimizer_offset_bytes >= 0;
  return has_them ? plan.flat_params[param.flat_param].optimizer_states : 0;
}

}  // namespace

absl::StatusOr<WriteRequest> ParseWrite(const ShardPlan& plan, const RankCommand& command, bool gradients) {
  const ParamPlan& param = plan.params[command.group];
  const int state = static_cast<int16_t>(command.flags >> kWrittenStateShift);  // -1: the count of updates
  const bool of_gradient = (command.flags & kOfGradient) != 0;
  if (state != 0 && of_gradient) {
    return absl::InvalidArgumentError(
        absl::StrCat("either a gradient or optimizer state (got both; state ", state, ")"));
  }
  if (state < -1 || state > StatesOf(plan, param) || (state == -1 && !param.requires_grad)) {
    return absl::InvalidArgumentError(
        absl::StrCat("no such optimizer state (got ", state, ", want -1 to ", StatesOf(plan, param), ")"));
  }
  WriteRequest request;
  request.param = command.group;
  if (state == -1) {
    if (command.arg0 < 0 || command.arg0 > kMaxUpdates) {
      return absl::InvalidArgumentError(
          absl::StrCat("count of updates is out of range (got ", command.arg0, ", want 0 to ", kMaxUpdates, ")"));
    }
    request.target = WriteRequest::Target::kUpdateCount;
    request.count = command.arg0;
    return request;
  }
  const int64_t numel = state > 0 ? StateNumel(plan, command.group, state - 1) : param.numel;
  if (command.arg0 < 0 || command.arg1 < 0 || command.arg0 > numel || command.arg1 > numel - command.arg0) {
    return absl::InvalidArgumentError(absl::StrCat("elements are out of range (got ", command.arg0, " + ", command.arg1,
                                                   ", want within ", numel, ")"));
  }
  if (of_gradient && !(gradients && param.requires_grad)) {
    return absl::FailedPreconditionError(param.requires_grad
                                             ? "gradients may be written after EnterFullParams(writeback, with_grads)"
                                             : "a frozen parameter has no gradient");
  }
  request.target = of_gradient ? WriteRequest::Target::kGradient : WriteRequest::Target::kPart;
  request.part = state;
  request.first = command.arg0;
  request.numel = command.arg1;
  const bool as_stored = !of_gradient && state == 0;
  request.element_bytes = DTypeSizeBytes(as_stored ? param.dtype : v1::DTYPE_FLOAT32);
  return request;
}

}  // namespace shardd
