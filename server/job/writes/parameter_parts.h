#ifndef SHARDD_SERVER_JOB_WRITES_PARAMETER_PARTS_H_
#define SHARDD_SERVER_JOB_WRITES_PARAMETER_PARTS_H_

// Where the parts of a parameter lie that trainers may write. Part 0 is the parameter itself, part k > 0 the state k -
// 1 of the daemon's optimizer. Where replicas have copies, copy 0 is meant; the commit carries it over to the others.

#include <cstdint>

#include "absl/status/status.h"
#include "common/plan/plan.h"

namespace shardd {

class JobMemory;
class JobSlab;

// A range of one slab. The slab outlives it.
struct SlabPart {
  const JobSlab* slab = nullptr;
  int64_t offset_bytes = 0;
  int64_t element_bytes = 0;
  int64_t numel = 0;

  int64_t size_bytes() const { return numel * element_bytes; }
  // Writes zeros to a piece, which it takes off the front. Blocks as JobSlab::Zero does.
  absl::Status ClearSome();
};

// All elements of the part. Its slab is null if the job has no such state. REQUIRES: a parameter of the plan.
SlabPart WholePart(const ShardPlan& plan, const JobMemory& memory, int param, int part);
// The elements of a parameter that this node holds: all, unless parameters are cut over nodes.
ParamRange ElementsOfNode(const ShardPlan& plan, int param);
// The same of a part. REQUIRES: the job has it.
SlabPart PartOfNode(const ShardPlan& plan, const JobMemory& memory, int param, int part);

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_PARAMETER_PARTS_H_
