#include "server/collective/nodes/nccl/rail_parts.h"

#include "common/plan/node_part.h"
#include "common/tensor/kernels.h"

namespace shardd {

RailParts::RailParts(const ShardPlan& plan, int group, int node, int rank) {
  const bool copied = plan.config.pass_copies();
  for (const int f : plan.groups[static_cast<size_t>(group)].flat_params) {
    const FlatParamPlan& flat = plan.flat_params[static_cast<size_t>(f)];
    const DType from = copied ? flat.unsharded_dtype : flat.dtype;
    const int64_t source_bytes = copied ? flat.params_offset_bytes : flat.shards_offset_bytes;
    const int64_t element_bytes = DTypeSizeBytes(flat.unsharded_dtype);
    int64_t end = -1;  // of the range before, in elements
    for (const Segment& segment : WorkSegmentsOn(plan, f, rank, node)) {
      if (segment.offset != end) {
        bytes_ = (bytes_ + kRailAlignmentBytes - 1) / kRailAlignmentBytes * kRailAlignmentBytes;
        ranges_.push_back({.offset_bytes = bytes_,
                           .source_bytes = source_bytes + segment.offset * DTypeSizeBytes(from),
                           .image_bytes = flat.pool_offset_bytes + segment.offset * element_bytes,
                           .numel = 0,
                           .from = from,
                           .to = flat.unsharded_dtype});
      }
      ranges_.back().numel += segment.numel;
      bytes_ += segment.numel * element_bytes;
      end = segment.offset + segment.numel;
    }
  }
}

std::vector<DeviceOp> RailParts::PackOps(const char* source, char* part) const {
  std::vector<DeviceOp> ops;
  for (const Range& range : ranges_) {
    ops.emplace_back(CastOp{source + range.source_bytes, range.from, part + range.offset_bytes, range.to, range.numel});
  }
  return ops;
}

std::vector<DeviceOp> RailParts::UnpackOps(const char* part, char* image) const {
  std::vector<DeviceOp> ops;
  for (const Range& range : ranges_) {
    ops.emplace_back(
        CopyOp{part + range.offset_bytes, image + range.image_bytes, range.numel * DTypeSizeBytes(range.to)});
  }
  return ops;
}

}  // namespace shardd
