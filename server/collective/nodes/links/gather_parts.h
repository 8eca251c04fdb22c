#ifndef SHARDD_SERVER_COLLECTIVE_NODES_LINKS_GATHER_PARTS_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_LINKS_GATHER_PARTS_H_

// A node's part of a group, as it travels to another node: its ranges (NodeRanges) one after the other, each cast to
// its flat parameter's unsharded_dtype. Where ranks read float8 (IsFloat8), the ranges are those of NodeRangesByParam,
// each in blocks of common/tensor/float8_blocks.h. Sender and receiver compute the same layout from the same plan.

#include <cstdint>
#include <vector>

#include "common/plan/node_part.h"
#include "common/plan/plan.h"

namespace shardd {

// Immutable.
class GatherParts {
 public:
  // REQUIRES: as NodeRanges.
  GatherParts(const ShardPlan& plan, int group, int node);

  int64_t bytes() const { return bytes_; }  // of the whole part as it travels; 0: the node holds nothing of the group
  // Casts the part from byte `offset` on into `to`, which must be aligned to 16 bytes: whole elements or whole float8
  // blocks, at least one, at most `max_bytes` (>= kMinPieceBytes). Returns the bytes written. `source`: start of slab
  // "shards" or, with pass_copies, of the copies that passes read, slab "parameters". REQUIRES: offset < bytes(), where
  // an earlier piece has ended.
  int64_t CopyOut(const char* source, int64_t offset, char* to, int64_t max_bytes) const;
  // Whether a piece of the part may end at byte `offset`: anywhere but within a float8 block.
  bool MayEndAt(int64_t offset) const;
  // Writes bytes [offset, offset + size) of the part to their places in `image`, the group's image in a pool slot.
  // REQUIRES: within bytes(); MayEndAt is true of both ends.
  void CopyIn(int64_t offset, const char* from, int64_t size, char* image) const;
  static constexpr int64_t kMinPieceBytes = 256;

 private:
  struct Range {
    int64_t offset = 0;        // in the part as it travels, in bytes
    int64_t bytes = 0;         // likewise, > 0
    int64_t source_bytes = 0;  // from the start of CopyOut's source
    int64_t image_bytes = 0;   // from the start of the group's image
    DType from = v1::DTYPE_UNSPECIFIED;
    DType to = v1::DTYPE_UNSPECIFIED;
    bool float8 = false;  // `bytes` are those of blocks
    int64_t numel = 0;
  };
  void AddRange(const ShardPlan& plan, const FlatRange& range, bool float8);
  std::vector<Range>::const_iterator RangeAt(int64_t offset) const;

  std::vector<Range> ranges_;  // ascending
  int64_t bytes_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_LINKS_GATHER_PARTS_H_
