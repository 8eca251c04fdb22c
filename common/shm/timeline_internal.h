#ifndef SHARDD_COMMON_SHM_TIMELINE_INTERNAL_H_
#define SHARDD_COMMON_SHM_TIMELINE_INTERNAL_H_

// Private to common/shm and its tests.

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"
#include "common/shm/timeline.h"

namespace shardd::shm_internal {

// TimelineWait with the maximum cost of a lost wake. A test that sets it long sees a lost wake as a timeout.
WaitResult TimelineWaitSliced(const TimelineWord& word, uint64_t target, std::atomic<uint32_t>& waiting,
                              absl::Duration limit, absl::Duration spin, absl::Duration slice);

}  // namespace shardd::shm_internal

#endif  // SHARDD_COMMON_SHM_TIMELINE_INTERNAL_H_
