#ifndef SHARDD_SERVER_JOB_MEMBERSHIP_GRADIENT_RENEWAL_H_
#define SHARDD_SERVER_JOB_MEMBERSHIP_GRADIENT_RENEWAL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/plan/plan.h"
#include "common/shm/unique_fd.h"
#include "server/job/membership/gradient_writers.h"

namespace shardd {

class CoreLoop;
class EpochEnd;
class JobControl;
class JobEvents;
class JobMemory;
class JobSlab;
class JobWork;
class OptimizerDevices;
struct PastProcess;
class Session;
class Sessions;
class StepDecision;
class WriteUndo;

// Gives a job new gradient shards where a rank cannot attach to the old ones, because an earlier process may still
// write them; whoever has a session begins anew with them. Owns who these processes are (GradientWriters) and whether
// new shards are being made. Loop-confined; slabs are made and freed on `maker`.
class GradientRenewal {
 public:
  // All of both outlive this.
  struct Facts {
    const ShardPlan* plan = nullptr;
    const Sessions* sessions = nullptr;
    const StepDecision* decision = nullptr;
    const WriteUndo* undo = nullptr;
    const EpochEnd* end = nullptr;   // a closed job makes nothing any more
    std::function<bool()> promised;  // a step may be decided on another node
  };
  struct Services {
    JobMemory* memory = nullptr;
    JobWork* work = nullptr;
    const OptimizerDevices* devices = nullptr;
    CoreLoop* maker = nullptr;
    JobEvents* events = nullptr;
    JobControl* job = nullptr;
    // Runs a closure on the copier, behind all copies that were asked for.
    std::function<void(absl::AnyInvocable<void()>)> behind_copies;
    std::function<void()> renewed;  // the job has new gradient shards
  };
  GradientRenewal(Facts facts, Services services);

  const GradientWriters& writers() const { return writers_; }

  // The shards are of the daemon before, whose ranks may live on.
  void TakeUp() { writers_.TakeUp(); }
  void TakeUp(const PastProcess& former) { writers_.TakeUp(former); }
  // The epoch of the session ends, and its process may live on.
  void EpochEnded(const Session& session) { writers_.EpochEnded(session); }
  // Whether processes that the rank has had keep it from attaching. ABORTED: the client must attach again, when they
  // have ended or new shards are there. RESOURCE_EXHAUSTED: not before a process has ended. `what` begins every text.
  // `process`: the pidfd of who asks, where there is one.
  absl::Status MayAttach(const std::string& what, int rank, int32_t pid, const UniqueFd& process, bool replace);
  // The same where it is known what keeps the rank.
  absl::Status Settle(const std::string& what, int rank, const AttachAnswer& answer);
  // Frees the slab that was left to processes which have ended.
  void FreeUnused();

 private:
  absl::Status Renew(const std::string& what, const std::string& why);
  void Made(absl::StatusOr<std::unique_ptr<JobSlab>> slab);

  const Facts see_;
  const Services use_;
  GradientWriters writers_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_MEMBERSHIP_GRADIENT_RENEWAL_H_
