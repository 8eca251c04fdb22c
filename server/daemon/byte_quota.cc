#include "server/daemon/byte_quota.h"

#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/shm/slab.h"
#include "common/status/status_macros.h"
#include "server/device/device.h"
#include "server/device/device_memory.h"

namespace shardd {

absl::StatusOr<int64_t> MemoryOf(const std::vector<std::unique_ptr<Device>>& devices) {
  SHARDD_ASSIGN_OR_RETURN(const MemoryLimits host, GetMemoryLimits());
  int64_t bytes = host.free_bytes;
  std::set<DeviceMemory*> gpus;
  for (const auto& device : devices) gpus.insert(device->memory());
  gpus.erase(nullptr);  // on the host
  for (DeviceMemory* const gpu : gpus) {
    SHARDD_ASSIGN_OR_RETURN(const DeviceMemory::Room room, gpu->GetRoom());
    bytes += room.total_bytes;
  }
  return bytes;
}

absl::StatusOr<int64_t> ParseByteQuota(absl::string_view flag, absl::string_view text, int64_t memory_bytes) {
  int64_t number = 0;
  absl::string_view digits = text;
  const bool is_share = absl::ConsumeSuffix(&digits, "%");
  if (!absl::SimpleAtoi(digits, &number) || number < 0 || (is_share && (number == 0 || number > 100))) {
    return absl::InvalidArgumentError(absl::StrCat(
        flag, ": not a quota (got \"", text, "\", want bytes, as in 64000000000, a share, as in 50%, or 0 for none)"));
  }
  return is_share ? memory_bytes / 100 * number : number;
}

absl::Status CheckByteQuota(absl::string_view what, int64_t quota_bytes, uint32_t uid, int64_t held_bytes,
                            int64_t more_bytes) {
  return quota_bytes == 0 || held_bytes + more_bytes <= quota_bytes
             ? absl::OkStatus()
             : absl::ResourceExhaustedError(absl::StrCat(what, ": quota of uid ", uid, " is exceeded (got ",
                                                         held_bytes + more_bytes, " bytes, of which ", held_bytes,
                                                         " are held by its jobs, want at most ", quota_bytes,
                                                         "); close a job, or raise --max_bytes_per_uid"));
}

}  // namespace shardd
