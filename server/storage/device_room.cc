#include "server/storage/device_room.h"

#include "absl/strings/str_cat.h"

namespace shardd {

void DeviceRoom::AddSlots(const ShardPlan& plan, const SlabPlace& place) {
  for (int rank = 0; rank < plan.world_size && !place.users.empty(); ++rank) {
    DeviceMemory* const on = place.users[static_cast<size_t>(rank) % place.users.size()];
    const int64_t page_bytes = on->PageBytes().value_or(1);
    Add({{on, (plan.memory.gradient_slots_bytes + page_bytes - 1) / page_bytes * page_bytes}});
  }
}

void DeviceRoom::Add(const std::vector<DeviceMemory::Part>& parts) {
  for (const DeviceMemory::Part& part : parts) {
    if (part.on == nullptr) continue;
    auto& [on, size_bytes] = wanted_[part.on->device()];
    on = part.on;
    size_bytes += part.size_bytes;
  }
}

absl::Status DeviceRoom::Check() const {
  std::string full;
  for (const auto& [device, wanted] : wanted_) {
    const absl::StatusOr<DeviceMemory::Room> room = wanted.first->GetRoom();
    if (!room.ok() || wanted.second <= room->free_bytes) continue;
    absl::StrAppend(&full, full.empty() ? "" : "; ", device, " has no room for its slabs and gradient slots (got ",
                    room->free_bytes, " bytes free of ", room->total_bytes, ", want ", wanted.second,
                    "; slabs of other jobs hold ", room->slab_bytes, ")");
  }
  if (full.empty()) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(full, "; end another job, use more GPUs, or keep its state on the host (JobConfig.offload)"));
}

}  // namespace shardd
