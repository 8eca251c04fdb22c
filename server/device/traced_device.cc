#include "server/device/traced_device.h"

namespace shardd {

void WorkTrace::Add(TracedWork work) {
  absl::MutexLock lock(&mutex_);
  if (kept_.size() >= kMaxKept) {
    ++lost_;
    return;
  }
  kept_.push_back(std::move(work));
}

std::pair<std::vector<TracedWork>, int64_t> WorkTrace::Take() {
  absl::MutexLock lock(&mutex_);
  return {std::exchange(kept_, {}), std::exchange(lost_, 0)};
}

void TracedDevice::Submit(StreamId stream, DeviceWork work) {
  work.owner = owner_;
  if (trace_->on()) {
    work.timing = std::make_shared<WorkTiming>();
    work.done = [trace = trace_, timing = work.timing, rank = rank_, stream, device = device_->name(),
                 label = work.label, done = std::move(work.done)](absl::Status status) {
      if (timing->begin_ns != 0) {  // not cancelled
        trace->Add({rank, stream, device, label, timing->begin_ns, timing->end_ns});
      }
      if (done) {
        done(std::move(status));
      }
    };
  }
  device_->Submit(stream, std::move(work));
}

}  // namespace shardd
