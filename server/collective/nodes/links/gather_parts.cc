#include "server/collective/nodes/links/gather_parts.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "common/plan/node_part.h"
#include "common/tensor/kernels.h"

namespace shardd {

GatherParts::GatherParts(const ShardPlan& plan, int group, int node) {
  for (const FlatRange& range : NodeRanges(plan, group, node)) {
    const FlatParamPlan& flat = plan.flat_params[static_cast<size_t>(range.flat_param)];
    const int64_t element_bytes = DTypeSizeBytes(flat.unsharded_dtype);
    const bool copied = plan.config.pass_copies();
    const DType from = copied ? flat.unsharded_dtype : flat.dtype;
    ranges_.push_back({.offset = bytes_,
                       .bytes = range.numel * element_bytes,
                       .source_bytes = (copied ? flat.params_offset_bytes : flat.shards_offset_bytes) +
                                       range.offset * DTypeSizeBytes(from),
                       .image_bytes = flat.pool_offset_bytes + range.offset * element_bytes,
                       .from = from,
                       .to = flat.unsharded_dtype});
    bytes_ += ranges_.back().bytes;
  }
}

std::vector<GatherParts::Range>::const_iterator GatherParts::RangeAt(int64_t offset) const {
  return std::prev(std::upper_bound(ranges_.begin(), ranges_.end(), offset,
                                    [](int64_t at, const Range& range) { return at < range.offset; }));
}

int64_t GatherParts::CopyOut(const char* source, int64_t offset, char* to, int64_t max_bytes) const {
  int64_t copied = 0;
  for (auto range = RangeAt(offset); range != ranges_.end(); ++range) {
    const int64_t element_bytes = DTypeSizeBytes(range->to);
    if (copied % element_bytes != 0) {
      break;  // wider elements than those before, which casts want aligned
    }
    const int64_t first = (offset + copied - range->offset) / element_bytes;
    const int64_t count = std::min(range->bytes / element_bytes - first, (max_bytes - copied) / element_bytes);
    // Equal dtypes are copied, whatever they are.
    Cast(source + range->source_bytes + first * DTypeSizeBytes(range->from), range->from, to + copied, range->to,
         count);
    copied += count * element_bytes;
    if (first + count < range->bytes / element_bytes) {
      break;
    }
  }
  return copied;
}

void GatherParts::CopyIn(int64_t offset, const char* from, int64_t size, char* image) const {
  auto range = RangeAt(offset);
  while (size > 0) {
    const int64_t first = offset - range->offset;
    const int64_t count = std::min(size, range->bytes - first);
    memcpy(image + range->image_bytes + first, from, static_cast<size_t>(count));
    offset += count;
    from += count;
    size -= count;
    ++range;
  }
}

}  // namespace shardd
