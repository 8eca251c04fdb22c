#include "server/job/gradients/settle.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <set>

#include "server/device/device_op.h"

namespace shardd {
namespace {

constexpr int kNone = std::numeric_limits<int>::max();

struct Part {
  int64_t end = 0;
  int copy = kNone;  // the first that holds something
};
// By their first element; those of two ranks are equal or apart.
using Parts = std::map<int64_t, Part>;

Parts PartsToSettle(const ShardPlan& plan, int flat_param, const GradientPresence::Uneven& has) {
  Parts parts;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    for (const Segment& segment : OwnedSegments(plan, Purpose::kGradients, flat_param, rank)) {
      if (const auto it = has.find(segment.param); it != has.end()) {
        Part& part = parts[segment.offset];
        part.end = segment.offset + segment.numel;
        if (it->second[rank]) {
          part.copy = std::min(part.copy, plan.gradient_copies > 1 ? plan.placement.replica_index[rank] : 0);
        }
      }
    }
  }
  std::erase_if(parts, [](const auto& part) { return part.second.copy == 0; });
  return parts;
}

}  // namespace

DeviceOps SettleOps(const ShardPlan& plan, char* gradients, const GradientPresence::Uneven& has) {
  DeviceOps ops(static_cast<size_t>(plan.world_size));
  std::set<int> flat_params;
  for (const auto& [param, ranks] : has) {
    flat_params.insert(plan.params[param].flat_param);
  }
  for (int flat_param : flat_params) {
    const Parts parts = PartsToSettle(plan, flat_param, has);
    // By the device that works on an element anyway, so that its streams keep the order.
    auto* const elements = reinterpret_cast<float*>(gradients + plan.flat_params[flat_param].gradients_offset_bytes);
    for (int worker = 0; worker < plan.world_size; ++worker) {
      for (const Segment& work : WorkSegments(plan, flat_param, worker)) {
        auto it = parts.upper_bound(work.offset);
        it = it == parts.begin() ? it : std::prev(it);
        for (; it != parts.end() && it->first < work.offset + work.numel; ++it) {
          const int64_t begin = std::max(work.offset, it->first);
          const int64_t end = std::min(work.offset + work.numel, it->second.end);
          if (begin >= end) {
            continue;
          }
          float* const first = elements + begin;
          const int64_t size_bytes = (end - begin) * static_cast<int64_t>(sizeof(float));
          if (it->second.copy == kNone) {
            ops[worker].emplace_back(ZeroOp{first, size_bytes});
          } else {
            const char* const source = reinterpret_cast<char*>(first) + it->second.copy * plan.gradients_stride_bytes;
            ops[worker].emplace_back(CopyOp{source, first, size_bytes});
          }
        }
      }
    }
  }
  return ops;
}

}  // namespace shardd
