#include "client/fsdp/gradient_slots.h"

#include <algorithm>
#include <numeric>

namespace shardd::fsdp {
namespace {

// Of the dtypes that gradients have.
int64_t ElementBytes(int32_t dtype) {
  switch (dtype) {
    case SHARDD_FLOAT64:
      return 8;
    case SHARDD_FLOAT32:
      return 4;
    default:
      return 2;
  }
}

}  // namespace

std::vector<GradientRange> GradientRanges(const Job& job) {
  std::vector<GradientRange> ranges;
  const int32_t count = job.info().param_count;
  for (int32_t p = 0; p < count; ++p) {
    if (const auto* begin = static_cast<const char*>(job.gradient_data(p)); begin != nullptr) {
      const shardd_param_info param = job.parameter_info(p);
      ranges.push_back({begin, begin + param.numel * ElementBytes(param.unsharded_dtype), param.group});
    }
  }
  return ranges;
}

std::vector<int32_t> SharedSlots(std::vector<GradientRange> ranges, size_t groups) {
  std::sort(ranges.begin(), ranges.end(),
            [](const GradientRange& a, const GradientRange& b) { return a.begin < b.begin; });
  std::vector<int32_t> slots(groups);
  std::iota(slots.begin(), slots.end(), 0);
  const auto find = [&slots](int32_t group) {
    while (slots[static_cast<size_t>(group)] != group) {
      group = slots[static_cast<size_t>(group)];
    }
    return group;
  };
  const char* reached = nullptr;
  int32_t reaches = 0;  // the group whose range ends at `reached`
  for (const GradientRange& range : ranges) {
    if (reached != nullptr && range.begin < reached) {
      const int32_t a = find(reaches);
      const int32_t b = find(range.group);
      slots[static_cast<size_t>(std::max(a, b))] = std::min(a, b);
    }
    if (reached == nullptr || range.end > reached) {
      reached = range.end;
      reaches = range.group;
    }
  }
  for (size_t g = 0; g < slots.size(); ++g) {
    slots[g] = find(static_cast<int32_t>(g));
  }
  return slots;
}

}  // namespace shardd::fsdp
