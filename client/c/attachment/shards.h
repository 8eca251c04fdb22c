#ifndef SHARDD_CLIENT_C_ATTACHMENT_SHARDS_H_
#define SHARDD_CLIENT_C_ATTACHMENT_SHARDS_H_

// Where a parameter lies in the slabs of its job. REQUIRES: `param` within the plan.

#include <cstdint>

#include "client/c/attachment/attachment.h"

namespace shardd {

// The parameter as it is stored, in copy `copy` of the slab; copy 0 is what counts.
const char* StoredParameterAt(const Attachment& attachment, int param, int64_t copy);
// Its reduced gradient, likewise; null where it is frozen.
char* ReducedGradientAt(const Attachment& attachment, int param, int64_t copy);

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_ATTACHMENT_SHARDS_H_
