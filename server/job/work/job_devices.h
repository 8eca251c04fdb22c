#ifndef SHARDD_SERVER_JOB_WORK_JOB_DEVICES_H_
#define SHARDD_SERVER_JOB_WORK_JOB_DEVICES_H_

#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "server/job/work/optimizer_devices.h"

namespace shardd {

class Collective;
class CoreLoop;
class Device;

// Who does a job's work: the devices of its ranks and of its optimizer, the collective between them, and the thread
// that makes sessions and frees what they leave. Owns the devices that are the job's own, the collective and the
// thread. Constant, until its end begins; until then any thread may read it.
class JobDevices {
 public:
  struct Parts {
    std::vector<Device*> by_rank;    // outlive the job, or are `own`
    std::vector<Device*> optimizer;  // likewise, as OptimizerDevices takes them; empty: `by_rank`
    std::vector<std::unique_ptr<Device>> own;
    std::unique_ptr<Collective> collective;
    std::unique_ptr<CoreLoop> memory_worker;
  };
  explicit JobDevices(Parts parts);
  ~JobDevices();

  const std::vector<Device*>& by_rank() const { return by_rank_; }
  const OptimizerDevices& optimizer() const { return optimizer_; }
  Collective* collective() const { return collective_.get(); }
  // Makes sessions and frees what they leave, in this order: a session that is made has the memory of the one before.
  // Both take as long as their memory is large, and keep no other job from its own.
  CoreLoop* memory_worker() const { return memory_worker_.get(); }

  // The end of the job, in this order; whatever else uses the collective goes in between.
  // Stops the thread when it has freed all that it was given. Returns false if that takes longer than `limit`: then the
  // thread keeps that memory, and the job's own devices with it, for ever.
  bool EndMemoryWorker(absl::Duration limit);
  void EndCollective();

 private:
  std::vector<std::unique_ptr<Device>> own_;
  const std::vector<Device*> by_rank_;
  const OptimizerDevices optimizer_;
  std::unique_ptr<Collective> collective_;
  std::unique_ptr<CoreLoop> memory_worker_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WORK_JOB_DEVICES_H_
