#ifndef SHARDD_SERVER_STORAGE_DEVICE_ROOM_H_
#define SHARDD_SERVER_STORAGE_DEVICE_ROOM_H_

// Whether a job's GPUs have the memory that its plan takes of them, before any of it is taken.

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "server/device/device_memory.h"

namespace shardd {

// Thread-compatible. What its devices are outlives it.
class DeviceRoom {
 public:
  // The gradient slots of all ranks, each on its own device.
  void AddSlots(const ShardPlan& plan, const SlabPlace& place);
  // The parts of a slab.
  void Add(const std::vector<DeviceMemory::Part>& parts);
  // RESOURCE_EXHAUSTED: they do not fit, with each device that is too full, what is free there and what other jobs
  // have. A device that does not say what it has is none of these.
  absl::Status Check() const;

 private:
  std::map<std::string, std::pair<DeviceMemory*, int64_t>> wanted_;  // by name: the same order in every message
};

}  // namespace shardd

#endif  // SHARDD_SERVER_STORAGE_DEVICE_ROOM_H_
