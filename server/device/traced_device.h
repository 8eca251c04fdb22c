#ifndef SHARDD_SERVER_DEVICE_TRACED_DEVICE_H_
#define SHARDD_SERVER_DEVICE_TRACED_DEVICE_H_

// One job's view of a device: its work is marked as the job's and, while the job is traced, the begin and end of each
// work are recorded. Without a trace a call costs one load.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/device/device.h"

namespace shardd {

struct TracedWork {
  int rank = 0;
  StreamId stream = StreamId::kUnshard;
  std::string device;
  std::string label;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

// Trace of one job. Thread-safe.
class WorkTrace {
 public:
  // Work beyond this number that nobody has taken is counted and dropped.
  static constexpr size_t kMaxKept = 1 << 15;

  void SetOn(bool on) { on_.store(on, std::memory_order_relaxed); }
  bool on() const { return on_.load(std::memory_order_relaxed); }
  void Add(TracedWork work) ABSL_LOCKS_EXCLUDED(mutex_);
  // All work since the last call, in the order of completion, and the number dropped.
  std::pair<std::vector<TracedWork>, int64_t> Take() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  std::atomic<bool> on_ = false;
  absl::Mutex mutex_;
  std::vector<TracedWork> kept_ ABSL_GUARDED_BY(mutex_);
  int64_t lost_ ABSL_GUARDED_BY(mutex_) = 0;
};

// One rank's device. Thread-safe.
class TracedDevice final : public Device {
 public:
  // `device` must outlive this. `owner`: value of DeviceWork::owner.
  TracedDevice(Device* device, std::shared_ptr<WorkTrace> trace, int rank, WorkOwner owner)
      : device_(device), trace_(std::move(trace)), rank_(rank), owner_(owner) {}

  const std::string& name() const override { return device_->name(); }
  DeviceMemory* memory() const override { return device_->memory(); }
  void Submit(StreamId stream, DeviceWork work) override;
  std::vector<StreamStatus> Status() const override { return device_->Status(); }
  // Does nothing: jobs share the device.
  void Shutdown() override {}

 private:
  Device* const device_;
  const std::shared_ptr<WorkTrace> trace_;
  const int rank_;
  const WorkOwner owner_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_TRACED_DEVICE_H_
