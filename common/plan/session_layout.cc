#include "common/plan/session_layout.h"

#include "common/plan/layout_internal.h"
#include "common/shm/page.h"
#include "common/shm/ring.h"
#include "common/shm/sum_ring.h"
#include "common/shm/trace_ring.h"

namespace shardd {
namespace {

constexpr int64_t kPageBytes = 4096;

}  // namespace

SessionLayout MakeSessionLayout(const ShardPlan& plan, bool slots_elsewhere) {
  using plan_internal::RoundUp;
  SessionLayout layout;
  layout.ring_offset_bytes = RoundUp(sizeof(ClientPage), kPageBytes);
  layout.trace_offset_bytes = RoundUp(layout.ring_offset_bytes + kRingBytes, kPageBytes);
  layout.masks_offset_bytes = RoundUp(layout.trace_offset_bytes + kTraceRingBytes, kPageBytes);
  int64_t end_bytes = layout.masks_offset_bytes;
  layout.mask_offset_bytes.reserve(plan.groups.size());
  layout.mask_size_bytes.reserve(plan.groups.size());
  for (const GroupPlan& group : plan.groups) {
    const int64_t mask_bytes = (static_cast<int64_t>(group.params.size()) + 7) / 8;
    layout.mask_offset_bytes.push_back(end_bytes);
    layout.mask_size_bytes.push_back(mask_bytes);
    end_bytes += 2 * mask_bytes;  // `present`, then `fresh`
  }
  layout.payload_offset_bytes = RoundUp(end_bytes, kPageBytes);
  layout.slots_offset_bytes = RoundUp(layout.payload_offset_bytes + kStepPayloadBytes, kPageBytes);
  const bool sums = plan.config.trainer_sums();
  if (sums) {
    layout.sum_words_offset_bytes = layout.slots_offset_bytes;
    layout.slots_offset_bytes += RoundUp(sizeof(SumWords), kPageBytes);
  }
  layout.memory_bytes =
      RoundUp(layout.slots_offset_bytes + (slots_elsewhere ? 0 : plan.memory.gradient_slots_bytes), kPageBytes);
  // sizeof, not the offset of the tail: slightly more than needed, and right wherever the tail starts.
  layout.daemon_page_bytes =
      RoundUp(static_cast<int64_t>(sizeof(DaemonPage) + plan.gradient_slots.size() * sizeof(SlotEntry) +
                                   plan.groups.size() * sizeof(GroupEntry)),
              kPageBytes);
  if (sums) {
    layout.sum_ring_offset_bytes = layout.daemon_page_bytes;
    layout.daemon_page_bytes += RoundUp(sizeof(SumRing), kPageBytes);
  }
  return layout;
}

}  // namespace shardd
