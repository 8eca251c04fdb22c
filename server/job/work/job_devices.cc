#include "server/job/work/job_devices.h"

#include <utility>

#include "server/collective/collective.h"
#include "server/device/device.h"
#include "server/loop/core_loop.h"

namespace shardd {

JobDevices::JobDevices(Parts parts)
    : own_(std::move(parts.own)),
      by_rank_(std::move(parts.by_rank)),
      optimizer_(parts.optimizer.empty() ? by_rank_ : std::move(parts.optimizer), static_cast<int>(by_rank_.size())),
      collective_(std::move(parts.collective)),
      memory_worker_(std::move(parts.memory_worker)) {}

JobDevices::~JobDevices() = default;

bool JobDevices::EndMemoryWorker(absl::Duration limit) {
  if (memory_worker_->Stop(limit)) return true;
  (void)memory_worker_.release();
  for (std::unique_ptr<Device>& device : own_) (void)device.release();
  return false;
}

void JobDevices::EndCollective() { collective_.reset(); }

}  // namespace shardd
