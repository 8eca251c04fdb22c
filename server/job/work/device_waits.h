#ifndef SHARDD_SERVER_JOB_WORK_DEVICE_WAITS_H_
#define SHARDD_SERVER_JOB_WORK_DEVICE_WAITS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/plan/plan.h"
#include "common/shm/fd_channel.h"
#include "server/job/job_part.h"
#include "server/job/membership/attach_answer.h"
#include "server/job/membership/trainer_sums.h"
#include "server/job/work/given_back.h"

namespace shardd {

class Committed;
class CoreLoop;
class Device;
class Sessions;

// What a job waits for that its ranks' processes and devices say in memory alone, so that somebody has to look: memory
// that devices have done with (GivenBack), and sums that trainers make (TrainerSums). Owns both, and the timer that
// keeps the loop looking while there is something to see. Loop-confined.
class DeviceWaits final : public JobPart {
 public:
  struct Facts {
    const ShardPlan* plan = nullptr;
    const Committed* committed = nullptr;
    const Sessions* sessions = nullptr;
    const std::vector<Device*>* devices = nullptr;  // by rank
  };
  struct Services {
    Collective* collective = nullptr;
    CoreLoop* loop = nullptr;
    CoreLoop* reaper = nullptr;  // frees what holds the memory of sessions
    JobControl* job = nullptr;
  };
  // All of both outlive this.
  DeviceWaits(Facts facts, Services services);

  GivenBack& given_back() { return given_back_; }
  TrainerSums& sums() { return sums_; }
  const TrainerSums& sums() const { return sums_; }
  PollTimer& timer() { return timer_; }

  // Looks, and runs what has waited long enough. True: there was something. The epoch may have ended meanwhile.
  bool Poll();
  // Nothing of what waits runs.
  void EndEpoch() override;
  // DEADLINE_EXCEEDED: a rank has been waited for too long, whose number goes to *rank: for its part of a sum; for the
  // signal behind which it has given memory back. REQUIRES of the latter: every rank has a session.
  absl::Status CheckSums(absl::Time now, int* rank) const;
  absl::Status CheckSignals(absl::Time now, int* rank) const;

  // Frees what is known of ended sessions whose sums have ended, or of all of them where their sums do no harm.
  void ForgetStragglers();
  void ForgetAllStragglers();
  // Whether sums of a session that the rank has had keep it from attaching; as TrainerSums::MayAttach.
  AttachAnswer MayAttach(const std::string& what, int rank, int32_t pid, bool replace);
  // The descriptor of the gradient slots that kFdFirstPeerSlots names.
  absl::StatusOr<int> SlotsOfPeer(FdRange range) const;

 private:
  bool RunGivenBack();
  void PollNoMore();

  const Facts see_;
  const Services use_;
  PollTimer timer_;
  GivenBack given_back_;
  TrainerSums sums_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WORK_DEVICE_WAITS_H_
