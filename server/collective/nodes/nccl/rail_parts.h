#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NCCL_RAIL_PARTS_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NCCL_RAIL_PARTS_H_

// What one rank of one node holds of a group, as it travels to the same rank of other nodes: its ranges one after the
// other, each cast to its flat parameter's unsharded_dtype and at a multiple of kRailAlignmentBytes. Sender and
// receiver compute the same layout from the same plan.

#include <cstdint>
#include <vector>

#include "common/plan/node_part.h"
#include "common/plan/plan.h"
#include "server/device/device_op.h"

namespace shardd {

// Immutable.
class RailParts {
 public:
  // REQUIRES: as WorkSegmentsOn, for all flat parameters of the group.
  RailParts(const ShardPlan& plan, int group, int node, int rank);

  int64_t bytes() const { return bytes_; }  // of the whole part; 0: the rank holds nothing of the group
  // Operations that cast the rank's ranges of `source` into `part`, or write `part` to its places in `image`, the
  // group's image in a pool slot. `source`: slab "shards", or "parameters" where passes read copies.
  std::vector<DeviceOp> PackOps(const char* source, char* part) const;
  std::vector<DeviceOp> UnpackOps(const char* part, char* image) const;

 private:
  struct Range {
    int64_t offset_bytes = 0;  // in the part
    int64_t source_bytes = 0;  // from the start of the slab
    int64_t image_bytes = 0;   // from the start of the group's image
    int64_t numel = 0;
    DType from = v1::DTYPE_UNSPECIFIED;
    DType to = v1::DTYPE_UNSPECIFIED;
  };
  std::vector<Range> ranges_;
  int64_t bytes_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NCCL_RAIL_PARTS_H_
