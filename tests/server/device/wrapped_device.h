#ifndef SHARDD_TESTS_SERVER_DEVICE_WRAPPED_DEVICE_H_
#define SHARDD_TESTS_SERVER_DEVICE_WRAPPED_DEVICE_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/device/device.h"

namespace shardd {

// Passes work on to another device, remembers it, and can make it fail. Thread-safe.
class WrappedDevice final : public Device {
 public:
  struct Record {
    StreamId stream;
    std::string label;
    std::vector<DeviceOp> ops;
  };

  explicit WrappedDevice(Device* inner) : inner_(inner) {}

  // From now on no operation runs and `done` gets `status`, on the inner device's thread.
  void FailWith(absl::Status status) {
    absl::MutexLock lock(&mutex_);
    failure_ = std::move(status);
  }
  std::vector<Record> records() const {
    absl::MutexLock lock(&mutex_);
    return records_;
  }

  const std::string& name() const override { return inner_->name(); }
  void Submit(StreamId stream, DeviceWork work) override {
    {
      absl::MutexLock lock(&mutex_);
      records_.push_back({stream, work.label, work.ops});
      if (!failure_.ok()) {
        work.ops.clear();
        work.done = [done = std::move(work.done), failure = failure_](absl::Status) { done(failure); };
      }
    }
    inner_->Submit(stream, std::move(work));
  }
  std::vector<StreamStatus> Status() const override { return inner_->Status(); }
  void Shutdown() override { inner_->Shutdown(); }

 private:
  Device* const inner_;
  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::vector<Record> records_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_DEVICE_WRAPPED_DEVICE_H_
