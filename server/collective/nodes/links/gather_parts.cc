#include "server/collective/nodes/links/gather_parts.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "common/tensor/float8_blocks.h"
#include "common/tensor/kernels.h"

namespace shardd {

GatherParts::GatherParts(const ShardPlan& plan, int group, int node) {
  for (const int f : plan.groups[static_cast<size_t>(group)].flat_params) {
    const bool float8 = IsFloat8(plan, f);
    for (const FlatRange& range : float8 ? NodeRangesByParam(plan, f, node) : NodeRangesOf(plan, f, node)) {
      AddRange(plan, range, float8);
    }
  }
}

void GatherParts::AddRange(const ShardPlan& plan, const FlatRange& range, bool float8) {
  const FlatParamPlan& flat = plan.flat_params[static_cast<size_t>(range.flat_param)];
  const int64_t element_bytes = DTypeSizeBytes(flat.unsharded_dtype);
  const bool copied = plan.config.pass_copies();
  const DType from = copied ? flat.unsharded_dtype : flat.dtype;
  ranges_.push_back({.offset = bytes_,
                     .bytes = float8 ? Float8BlocksBytes(range.numel) : range.numel * element_bytes,
                     .source_bytes = (copied ? flat.params_offset_bytes : flat.shards_offset_bytes) +
                                     range.offset * DTypeSizeBytes(from),
                     .image_bytes = flat.pool_offset_bytes + range.offset * element_bytes,
                     .from = from,
                     .to = flat.unsharded_dtype,
                     .float8 = float8,
                     .numel = range.numel});
  bytes_ += ranges_.back().bytes;
}

std::vector<GatherParts::Range>::const_iterator GatherParts::RangeAt(int64_t offset) const {
  return std::prev(std::upper_bound(ranges_.begin(), ranges_.end(), offset,
                                    [](int64_t at, const Range& range) { return at < range.offset; }));
}

int64_t GatherParts::CopyOut(const char* source, int64_t offset, char* to, int64_t max_bytes) const {
  int64_t copied = 0;
  for (auto range = RangeAt(offset); range != ranges_.end(); ++range) {
    const int64_t done_bytes = offset + copied - range->offset;
    int64_t first = 0;
    int64_t count = 0;
    int64_t bytes = 0;
    if (range->float8) {
      first = done_bytes / kFloat8BlockBytes * kFloat8BlockNumel;
      count = range->numel - first;
      if (Float8BlocksBytes(count) > max_bytes - copied) {
        count = (max_bytes - copied) / kFloat8BlockBytes * kFloat8BlockNumel;
      }
      EncodeFloat8Blocks(source + range->source_bytes + first * DTypeSizeBytes(range->from), range->from, range->to,
                         to + copied, count);
      bytes = Float8BlocksBytes(count);
    } else {
      const int64_t element_bytes = DTypeSizeBytes(range->to);
      if (copied % element_bytes != 0) {
        break;  // wider elements than those before, which casts want aligned
      }
      first = done_bytes / element_bytes;
      count = std::min(range->numel - first, (max_bytes - copied) / element_bytes);
      // Equal dtypes are copied, whatever they are.
      Cast(source + range->source_bytes + first * DTypeSizeBytes(range->from), range->from, to + copied, range->to,
           count);
      bytes = count * element_bytes;
    }
    copied += bytes;
    if (first + count < range->numel) {
      break;
    }
  }
  return copied;
}

bool GatherParts::MayEndAt(int64_t offset) const {
  if (offset >= bytes_) {
    return offset == bytes_;
  }
  const auto range = RangeAt(offset);
  return !range->float8 || (offset - range->offset) % kFloat8BlockBytes == 0;
}

void GatherParts::CopyIn(int64_t offset, const char* from, int64_t size, char* image) const {
  auto range = RangeAt(offset);
  while (size > 0) {
    const int64_t first = offset - range->offset;
    const int64_t count = std::min(size, range->bytes - first);
    if (range->float8) {
      const int64_t numel = first / kFloat8BlockBytes * kFloat8BlockNumel;
      const int64_t end = (first + count) / kFloat8BlockBytes * kFloat8BlockNumel;
      DecodeFloat8Blocks(from, image + range->image_bytes + numel * DTypeSizeBytes(range->to), range->to,
                         (first + count < range->bytes ? end : range->numel) - numel);
    } else {
      memcpy(image + range->image_bytes + first, from, static_cast<size_t>(count));
    }
    offset += count;
    from += count;
    size -= count;
    ++range;
  }
}

}  // namespace shardd
