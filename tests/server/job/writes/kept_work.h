#ifndef SHARDD_TESTS_SERVER_JOB_WRITES_KEPT_WORK_H_
#define SHARDD_TESTS_SERVER_JOB_WRITES_KEPT_WORK_H_

#include <string>
#include <utility>
#include <vector>

#include "server/device/device.h"

namespace shardd {

// A device that keeps what it is told to do until the test ends it. Nothing is done.
class KeptWork final : public Device {
 public:
  const std::string& name() const override { return name_; }
  void Submit(StreamId, DeviceWork work) override { kept_.push_back(std::move(work)); }
  std::vector<StreamStatus> Status() const override { return {}; }
  void Shutdown() override {}

  // Of what is kept.
  std::vector<std::string> labels() const {
    std::vector<std::string> labels;
    for (const DeviceWork& work : kept_) labels.push_back(work.label);
    return labels;
  }
  size_t ops() const {
    size_t ops = 0;
    for (const DeviceWork& work : kept_) ops += work.ops.size();
    return ops;
  }
  void EndAll(const absl::Status& status = absl::OkStatus()) {
    for (DeviceWork& work : std::exchange(kept_, {})) work.done(status);
  }

 private:
  const std::string name_ = "kept";
  std::vector<DeviceWork> kept_;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_JOB_WRITES_KEPT_WORK_H_
