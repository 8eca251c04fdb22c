#include "client/c/job/edits.h"

#include <string.h>

#include <algorithm>

#include "client/c/attachment/shards.h"
#include "common/status/status_macros.h"
#include "common/tensor/dtype.h"

namespace shardd {

void Edits::Reset() {
  own_.clear();
  step_under_way_ = false;
  if (!on()) {
    return;
  }
  const ShardPlan& plan = attachment_.plan().plan();
  const int64_t copy = attachment_.plan().copy_of(plan.shard_copies) * plan.shards_stride_bytes;
  for (int flat = 0; flat < static_cast<int>(plan.flat_params.size()); ++flat) {
    const FlatParamPlan& of = plan.flat_params[static_cast<size_t>(flat)];
    const int64_t element_bytes = DTypeSizeBytes(of.dtype);
    for (const Segment& segment : WriteSegments(plan, flat, attachment_.rank())) {
      const int64_t first = copy + of.shards_offset_bytes + segment.offset * element_bytes;
      own_.push_back({first, first + segment.numel * element_bytes});
    }
  }
  std::sort(own_.begin(), own_.end(), [](const Range& a, const Range& b) { return a.first < b.first; });
}

absl::StatusOr<int64_t> Edits::FirstDifference(Range range) const {
  constexpr int64_t kPieceBytes = int64_t{64} << 10;
  const MappedSlab& slab = attachment_.memory().shards_slab();
  std::vector<char> shared(static_cast<size_t>(std::min(kPieceBytes, range.end - range.first)));
  for (int64_t at = range.first; at < range.end; at += kPieceBytes) {
    const int64_t size = std::min(kPieceBytes, range.end - at);
    SHARDD_RETURN_IF_ERROR(attachment_.memory().shards_view().ReadShared(at, shared.data(), size));
    const char* const stored = slab.At<char>(at);
    if (memcmp(stored, shared.data(), static_cast<size_t>(size)) != 0) {
      return at + (std::mismatch(stored, stored + size, shared.data()).first - stored);
    }
  }
  return -1;
}

std::vector<Edits::Range> Edits::OwnOf(const std::vector<Range>& changed) const {
  std::vector<Range> ranges;
  for (const Range& pages : changed) {
    auto own = std::upper_bound(own_.begin(), own_.end(), pages.first,
                                [](int64_t first, const Range& range) { return first < range.end; });
    for (; own != own_.end() && own->first < pages.end; ++own) {
      ranges.push_back({std::max(own->first, pages.first), std::min(own->end, pages.end)});
    }
  }
  return ranges;
}

absl::StatusOr<std::string> Edits::NameFirst(const std::vector<Range>& ranges) const {
  for (const Range& range : ranges) {
    SHARDD_ASSIGN_OR_RETURN(int64_t at, FirstDifference(range));
    if (at >= 0) {
      const ShardPlan& plan = attachment_.plan().plan();
      at -= attachment_.plan().copy_of(plan.shard_copies) * plan.shards_stride_bytes;
      return NameAt(attachment_, attachment_.memory().shards_slab().At<char>(at));
    }
  }
  return std::string();
}

absl::StatusOr<std::string> Edits::FindAny() const {
  if (!on()) {
    return std::string();
  }
  SHARDD_ASSIGN_OR_RETURN(const std::vector<Range> changed, attachment_.memory().shards_view().Changed());
  return NameFirst(changed);
}

absl::StatusOr<std::string> Edits::FindOwn() {
  if (!on()) {
    return std::string();
  }
  PrivateView& view = attachment_.memory().shards_view();
  SHARDD_ASSIGN_OR_RETURN(const std::vector<Range> changed, view.Changed());
  SHARDD_ASSIGN_OR_RETURN(std::string name, NameFirst(OwnOf(changed)));
  if (name.empty() && !changed.empty()) {
    SHARDD_RETURN_IF_ERROR(view.Drop(changed));
  }
  return name;
}

absl::Status Edits::HandIn() {
  PrivateView& view = attachment_.memory().shards_view();
  SHARDD_ASSIGN_OR_RETURN(const std::vector<Range> changed, view.Changed());
  for (const Range& own : OwnOf(changed)) {
    SHARDD_RETURN_IF_ERROR(attachment_.memory().HandInShards(own.first, own.end - own.first));
  }
  return view.Drop(changed);
}

absl::Status Edits::WriteBack(Write write) {
  PrivateView& view = attachment_.memory().shards_view();
  SHARDD_ASSIGN_OR_RETURN(const std::vector<Range> changed, view.Changed());
  const RankPlan& plan = attachment_.plan();
  for (const Range& own : OwnOf(changed)) {
    for (int index = 0; index < static_cast<int>(plan.plan().params.size()); ++index) {
      const ParamPlan& param = plan.param(index);
      const int64_t element_bytes = DTypeSizeBytes(param.dtype);
      const int64_t begin = plan.flat_of(param).shards_offset_bytes + param.offset * element_bytes;
      const int64_t first = std::max(own.first, begin);
      const int64_t end = std::min(own.end, begin + param.numel * element_bytes);
      if (first < end) {  // pages begin and end between elements
        SHARDD_RETURN_IF_ERROR(write(index, attachment_.memory().shards_slab().At<char>(first),
                                     (first - begin) / element_bytes, (end - first) / element_bytes));
      }
    }
  }
  return view.Drop(changed);
}

}  // namespace shardd
