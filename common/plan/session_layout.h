#ifndef SHARDD_COMMON_PLAN_SESSION_LAYOUT_H_
#define SHARDD_COMMON_PLAN_SESSION_LAYOUT_H_

// Layout of a session's two shared objects. Client and daemon compute it from the same plan.
//   session memory (sealed memfd, the client writes):
//     [ClientPage 4 KiB][ring][trace ring][masks][step payload][gradient slots]     each part starts on a 4 KiB
//     boundary; with JobConfig.trainer_sums a page of the words of common/shm/sum_ring.h precedes the gradient slots
//   daemon page (memfd sealed against new writers, the daemon writes):
//     [DaemonPage header][one word per gradient slot][one entry per group], then, with trainer_sums, [sum ring]

#include <cstdint>
#include <vector>

#include "common/plan/plan.h"

namespace shardd {

inline constexpr int64_t kMaxTrainerStateBytes = int64_t{1} << 20;
// Room for one serialized v1::Step; also stages WriteParameters.
inline constexpr int64_t kStepPayloadBytes = kMaxTrainerStateBytes + (int64_t{256} << 10);

struct SessionLayout {
  int64_t ring_offset_bytes = 0;
  int64_t trace_offset_bytes = 0;
  int64_t masks_offset_bytes = 0;
  std::vector<int64_t> mask_offset_bytes;  // per group, from the start of the memory: `present`, then `fresh`
  std::vector<int64_t> mask_size_bytes;    // per group, of one mask: ceil(parameters / 8)
  int64_t payload_offset_bytes = 0;
  int64_t slots_offset_bytes = 0;      // gradient slot s at this + plan.gradient_slots[s].offset_bytes
  int64_t sum_words_offset_bytes = 0;  // in the session memory; 0: the job has no sum words
  int64_t sum_ring_offset_bytes = 0;   // in the daemon page; 0: the job has no sum ring
  int64_t memory_bytes = 0;            // of the session memory, whole pages
  int64_t daemon_page_bytes = 0;       // whole pages
};

// `slots_elsewhere`: gradient slots are in device memory; the session memory ends where they would begin.
SessionLayout MakeSessionLayout(const ShardPlan& plan, bool slots_elsewhere = false);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_SESSION_LAYOUT_H_
