#ifndef SHARDD_SERVER_JOB_WRITES_WRITE_REQUEST_H_
#define SHARDD_SERVER_JOB_WRITES_WRITE_REQUEST_H_

// What a WriteParameters command means.

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/plan/plan.h"

namespace shardd {

struct RankCommand;

struct WriteRequest {
  enum class Target {
    kUpdateCount,  // how often the daemon's optimizer has updated the parameter
    kGradient,
    kPart,  // parameter_parts.h
  };
  Target target = Target::kPart;
  int param = 0;
  int part = 0;       // kPart
  int64_t count = 0;  // kUpdateCount
  // The others: elements of the parameter, and bytes of each.
  int64_t first = 0;
  int64_t numel = 0;
  int64_t element_bytes = 0;

  int64_t size_bytes() const { return numel * element_bytes; }
};

// Pure. INVALID_ARGUMENT or FAILED_PRECONDITION, as what the plan does not have; the message is the fact alone.
// `gradients`: the rank may write gradients. REQUIRES: command.group is a parameter of the plan.
absl::StatusOr<WriteRequest> ParseWrite(const ShardPlan& plan, const RankCommand& command, bool gradients);

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_WRITE_REQUEST_H_
