#ifndef SHARDD_SERVER_JOB_WORK_OPTIMIZER_DEVICES_H_
#define SHARDD_SERVER_JOB_WORK_OPTIMIZER_DEVICES_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "server/device/device_op.h"

namespace shardd {

class Device;

using DeviceOps = std::vector<std::vector<DeviceOp>>;  // by device, which is by rank unless said otherwise

// Operations that do not depend on each other, in `parts` of about equal extents and in their order; an operation may
// be cut, at multiples of 4096 elements, so that no two parts write one line of a cache and norms keep their blocks.
// Every part of a norm names the same result. Always the same for the same operations.
DeviceOps SplitOps(std::vector<DeviceOp> ops, int parts);

// `parts`: of one rank's update (SplitOps). Each gets the log of its number from `log_of` where its operations have
// one, and `begin` hears of that log and of the number of its first element, before anything runs.
void LogByPart(std::vector<DeviceOp>* parts, int count, absl::FunctionRef<UpdateLog&(int part)> log_of,
               absl::FunctionRef<void(UpdateLog&, int64_t first)> begin);

// Who runs norms, updates and commits of a job: each rank's device, or, where its state is in host memory beside GPUs,
// as many threads of the host for each rank. Thread-compatible; the devices outlive it.
class OptimizerDevices {
 public:
  // devices[r * n + i] is the ith of n that share the work of rank r.
  OptimizerDevices(std::vector<Device*> devices, int ranks);

  // How many devices, and so calls of a `done`.
  int count() const { return static_cast<int>(devices_.size()); }
  int for_each_rank() const { return for_each_rank_; }
  // Takes what was made for each rank apart for the devices. `in_order`: a rank's operations depend on each other, so
  // one of its devices runs all of them.
  DeviceOps Divide(DeviceOps by_rank, bool in_order = false) const;
  // On `optimizer` of each device, also where there is nothing to do.
  void Submit(const std::string& label, DeviceOps by_device, const std::function<void(absl::Status)>& done) const;

 private:
  const std::vector<Device*> devices_;
  const int for_each_rank_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WORK_OPTIMIZER_DEVICES_H_
