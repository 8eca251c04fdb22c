#ifndef SHARDD_SERVER_JOB_JOB_EXTEND_H_
#define SHARDD_SERVER_JOB_JOB_EXTEND_H_

// A job takes the place of one whose ranks ask for more trained parameters (common/plan/extend.h): same name, same
// commits, another plan and so other slabs.

#include <cstdint>
#include <functional>

#include "common/plan/plan.h"

namespace shardd {

class JobCore;
struct SlabPointers;

// Copies parameters, their cast copies and optimizer state, of all replicas' copies, from the slabs of one plan to
// those of another that differs from it in what is trained only. What `from` has no state of keeps the zeros of new
// slabs. Gradients are not copied. Blocks as long as memory takes.
// `copy(to, from, bytes)` is memcpy where slabs lie on the host.
using CopyBetweenSlabs = std::function<void(char* to, const char* from, int64_t size_bytes)>;
void CopyExtended(const ShardPlan& from, const SlabPointers& source, const ShardPlan& to, const SlabPointers& target,
                  const CopyBetweenSlabs& copy);

// What the `build` of JobCore::Widen was called for is built. False: the state that this node lacked has come
// meanwhile, and maybe nobody else has it any more. It is restored first; then `build` is called again.
bool MayBeWidened(JobCore& job);

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_JOB_EXTEND_H_
