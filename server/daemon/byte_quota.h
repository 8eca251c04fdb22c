#ifndef SHARDD_SERVER_DAEMON_BYTE_QUOTA_H_
#define SHARDD_SERVER_DAEMON_BYTE_QUOTA_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardd {

class Device;

// The bytes that `text` grants: "1000000", or "50%" of `memory_bytes`, rounded down; 0: no quota. INVALID_ARGUMENT: it
// is neither, or more than 100%. `flag`: where the text comes from, for the error. Pure.
absl::StatusOr<int64_t> ParseByteQuota(absl::string_view flag, absl::string_view text, int64_t memory_bytes);

// What a share is of: memory of the host that is free, as its limits say it, and all memory of the devices' GPUs. Asks
// the system.
absl::StatusOr<int64_t> MemoryOf(const std::vector<std::unique_ptr<Device>>& devices);

// RESOURCE_EXHAUSTED: with `more_bytes` the jobs of `uid`, which hold `held_bytes`, have more than `quota_bytes` (0:
// none).
absl::Status CheckByteQuota(absl::string_view what, int64_t quota_bytes, uint32_t uid, int64_t held_bytes,
                            int64_t more_bytes);

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_BYTE_QUOTA_H_
