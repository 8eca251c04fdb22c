#ifndef SHARDD_SERVER_STORAGE_OLD_VALUES_PLAN_H_
#define SHARDD_SERVER_STORAGE_OLD_VALUES_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/plan.h"
#include "server/device/device_memory.h"

namespace shardd {

// How many elements an update by a GPU changes at a time, where it is logged: their old values are copied to another
// place of that GPU, and a stop of the stream is paid for, once for each. By the bytes that it moves, the update takes
// (28 + 24) / 28 of the time that it takes without a log (AdamW in fp32). Pieces of 4 Mi are some 70 us of a GPU of 3
// TB/s, beside which six more launches are some 10; the place of a rank is 48 MiB. Smaller ones would stay in the
// GPU's cache, but be mostly launches. Not measured on a GPU yet.
inline constexpr int64_t kLoggedPieceNumel = int64_t{4} << 20;

// The memory for old values of a job's ranks: each on the rank's GPU, in the order of ranks.
struct OldValuesPlan {
  int64_t numel = 0;  // of a piece; 0: nothing is updated
  int64_t stride_bytes = 0;
  std::vector<DeviceMemory::Part> parts;
};
absl::StatusOr<OldValuesPlan> PlanOldValues(const ShardPlan& plan, const SlabPlace& place);

}  // namespace shardd

#endif  // SHARDD_SERVER_STORAGE_OLD_VALUES_PLAN_H_
