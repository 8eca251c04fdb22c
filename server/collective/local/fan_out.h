#ifndef SHARDD_SERVER_COLLECTIVE_LOCAL_FAN_OUT_H_
#define SHARDD_SERVER_COLLECTIVE_LOCAL_FAN_OUT_H_

#include <functional>
#include <string>
#include <vector>

#include "server/collective/collective.h"
#include "server/device/device.h"

namespace shardd {

// One device's part of a request.
struct DevicePart {
  Device* device = nullptr;
  std::vector<DeviceOp> ops;
};

// The part of `device`, appended where it is new.
DevicePart& PartOf(std::vector<DevicePart>& parts, Device* device);

// `done` when the returned function was called `parts` times, on the thread of the last call, with the first error.
Collective::Done JoinParts(int parts, Collective::Done done);

// Submits every part that has operations to `stream`; `done` runs once, when the last has ended, with the error that
// came first. `failed`, where given, hears of each part's error at once: other parts may wait for that one. Without
// any, or when `status` is an error, it runs on `fallback` after what is queued there. Never blocks.
void FanOut(std::vector<DevicePart> parts, StreamId stream, const std::string& label, Device* fallback,
            absl::Status status, Collective::Done done, std::function<void(const absl::Status&)> failed = nullptr);

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_LOCAL_FAN_OUT_H_
