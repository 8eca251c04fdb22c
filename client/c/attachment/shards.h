#ifndef SHARDD_CLIENT_C_ATTACHMENT_SHARDS_H_
#define SHARDD_CLIENT_C_ATTACHMENT_SHARDS_H_

// Finds a parameter in the slabs of its job. REQUIRES: `param` is within the plan.

#include <cstdint>
#include <string>

#include "client/c/attachment/attachment.h"

namespace shardd {

// Returns the stored parameter in copy `copy` of the slab. Copy 0 is the authoritative one.
const char* StoredParameterAt(const Attachment& attachment, int param, int64_t copy);
// Returns its reduced gradient likewise, or null if the parameter is frozen.
char* ReducedGradientAt(const Attachment& attachment, int param, int64_t copy);

// Names the stored parameter at `address`, which is in copy 0: `parameter "head"`; else "padding".
std::string NameAt(const Attachment& attachment, const void* address);

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_ATTACHMENT_SHARDS_H_
