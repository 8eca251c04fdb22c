#ifndef SHARDD_SERVER_COLLECTIVE_NODES_GATHER_PARTS_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_GATHER_PARTS_H_

// What one node holds of a group, as it travels to another one: its ranges (NodeRanges) one behind the other, each cast
// to its flat parameter's unsharded_dtype. Whoever sends and whoever receives make the same of the same plan.

#include <cstdint>
#include <vector>

#include "common/plan/plan.h"

namespace shardd {

// Immutable.
class GatherParts {
 public:
  // REQUIRES: as NodeRanges.
  GatherParts(const ShardPlan& plan, int group, int node);

  int64_t bytes() const { return bytes_; }  // that travel; 0: the node holds nothing of the group
  // Casts what travels from byte `offset` on into `to`, which is aligned to 16 bytes: whole elements, at most
  // `max_bytes` (at least 16), at least one. Returns their bytes. `shards`: start of slab "shards".
  // REQUIRES: offset < bytes(), where an element begins.
  int64_t CopyOut(const char* shards, int64_t offset, char* to, int64_t max_bytes) const;
  // Writes bytes [offset, offset + size) of what travels to their places in `image`, the group's in a pool slot.
  // REQUIRES: within bytes().
  void CopyIn(int64_t offset, const char* from, int64_t size, char* image) const;

 private:
  struct Range {
    int64_t offset = 0;        // of what travels, in bytes
    int64_t bytes = 0;         // likewise, > 0
    int64_t shards_bytes = 0;  // from the start of slab "shards"
    int64_t image_bytes = 0;   // from the start of the group's image
    DType from = v1::DTYPE_UNSPECIFIED;
    DType to = v1::DTYPE_UNSPECIFIED;
  };
  std::vector<Range>::const_iterator RangeAt(int64_t offset) const;

  std::vector<Range> ranges_;  // ascending
  int64_t bytes_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_GATHER_PARTS_H_
