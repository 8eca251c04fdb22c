#ifndef SHARDD_SERVER_COLLECTIVE_NODES_LINKS_GATHER_PARTS_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_LINKS_GATHER_PARTS_H_

// A node's part of a group, as it travels to another node: its ranges (NodeRanges) one after the other, each cast to
// its flat parameter's unsharded_dtype. Sender and receiver compute the same layout from the same plan.

#include <cstdint>
#include <vector>

#include "common/plan/plan.h"

namespace shardd {

// Immutable.
class GatherParts {
 public:
  // REQUIRES: as NodeRanges.
  GatherParts(const ShardPlan& plan, int group, int node);

  int64_t bytes() const { return bytes_; }  // of the whole part as it travels; 0: the node holds nothing of the group
  // Casts the part from byte `offset` on into `to`, which must be aligned to 16 bytes: whole elements, at least one, at
  // most `max_bytes` (>= 16). Returns the bytes written. `source`: start of slab "shards" or, with pass_copies, of the
  // copies that passes read, slab "parameters". REQUIRES: offset < bytes(), at the start of an element.
  int64_t CopyOut(const char* source, int64_t offset, char* to, int64_t max_bytes) const;
  // Writes bytes [offset, offset + size) of the part to their places in `image`, the group's image in a pool slot.
  // REQUIRES: within bytes().
  void CopyIn(int64_t offset, const char* from, int64_t size, char* image) const;

 private:
  struct Range {
    int64_t offset = 0;        // in the part as it travels, in bytes
    int64_t bytes = 0;         // likewise, > 0
    int64_t source_bytes = 0;  // from the start of CopyOut's source
    int64_t image_bytes = 0;   // from the start of the group's image
    DType from = v1::DTYPE_UNSPECIFIED;
    DType to = v1::DTYPE_UNSPECIFIED;
  };
  std::vector<Range>::const_iterator RangeAt(int64_t offset) const;

  std::vector<Range> ranges_;  // ascending
  int64_t bytes_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_LINKS_GATHER_PARTS_H_
