#include "server/collective/local/fan_out.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/device/device.h"

namespace shardd {
namespace {

// State shared by the parts of one request. Thread-safe.
class Join {
 public:
  Join(int parts, Collective::Done done) : done_(std::move(done)), left_(parts) {}

  // Records the error unless an earlier one was recorded.
  void PartFails(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (status_.ok()) status_ = status;
  }
  void PartDone(absl::Status status) {
    absl::Status first;
    {
      absl::MutexLock lock(&mutex_);
      if (status_.ok()) status_ = std::move(status);
      if (--left_ > 0) return;
      first = status_;
    }
    if (done_) done_(std::move(first));
    done_ = nullptr;
  }

 private:
  Collective::Done done_;  // called by the last part only
  absl::Mutex mutex_;
  int left_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

Collective::Done JoinParts(int parts, Collective::Done done) {
  // Shared: each part's callback may be the last to need it.
  return [join = std::make_shared<Join>(parts, std::move(done))](absl::Status status) {
    join->PartDone(std::move(status));
  };
}

DevicePart& PartOf(std::vector<DevicePart>& parts, Device* device) {
  const auto found = std::find_if(parts.begin(), parts.end(), [&](const DevicePart& p) { return p.device == device; });
  if (found != parts.end()) return *found;
  parts.push_back({device, {}});
  return parts.back();
}

void FanOut(std::vector<DevicePart> parts, StreamId stream, const std::string& label, Device* fallback,
            absl::Status status, Collective::Done done, std::function<void(const absl::Status&)> failed) {
  parts.erase(std::remove_if(parts.begin(), parts.end(), [](const DevicePart& p) { return p.ops.empty(); }),
              parts.end());
  if (parts.empty() || !status.ok()) {
    // An error of the request is its first error.
    fallback->Submit(stream, {label, {}, [status = std::move(status), done = std::move(done)](const absl::Status& run) {
                                if (done) done(status.ok() ? run : status);
                              }});
    return;
  }
  const auto join = std::make_shared<Join>(static_cast<int>(parts.size()), std::move(done));
  for (DevicePart& part : parts) {
    part.device->Submit(stream, {label, std::move(part.ops), [join, failed](absl::Status run) {
                                   if (!run.ok()) {
                                     join->PartFails(run);  // before other parts end because of it
                                     if (failed) failed(run);
                                   }
                                   join->PartDone(std::move(run));
                                 }});
  }
}

}  // namespace shardd
