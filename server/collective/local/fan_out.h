#ifndef SHARDD_SERVER_COLLECTIVE_LOCAL_FAN_OUT_H_
#define SHARDD_SERVER_COLLECTIVE_LOCAL_FAN_OUT_H_

#include <functional>
#include <string>
#include <vector>

#include "server/collective/collective.h"

namespace shardd {

class Device;

// One device's part of a request.
struct DevicePart {
  Device* device = nullptr;
  std::vector<DeviceOp> ops;
};

// The part of `device`, which is appended if there is none.
DevicePart& PartOf(std::vector<DevicePart>& parts, Device* device);

// Returns a function that runs `done` with the first error on its `parts`-th call, on that call's thread.
Collective::Done JoinParts(int parts, Collective::Done done);

// Submits every part that has operations to `stream`. `done` runs once, when the last part has ended, with the first
// error. `failed`, if set, gets each part's error at once, because other parts may wait for that part. Without any
// part, or if `status` is an error, `done` runs on `fallback` after what is queued there. Never blocks.
void FanOut(std::vector<DevicePart> parts, StreamId stream, const std::string& label, Device* fallback,
            absl::Status status, Collective::Done done, std::function<void(const absl::Status&)> failed = nullptr);

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_LOCAL_FAN_OUT_H_
