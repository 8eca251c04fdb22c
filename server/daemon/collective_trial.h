#ifndef SHARDD_SERVER_DAEMON_COLLECTIVE_TRIAL_H_
#define SHARDD_SERVER_DAEMON_COLLECTIVE_TRIAL_H_

// The trial of --collective=auto. NCCL may hang, end its process or lose its GPUs, so what nobody has asked for by name
// runs in a process of its own, this program with --collective_trial (RunTrial, collectives.h), before the daemon
// listens. Its result, an error too, is in a file that later starts on the same machine go by, so a restart decides as
// the daemon before did, and what hung once costs no second start.

#include "absl/time/time.h"
#include "server/collective/nccl/nccl_library.h"
#include "server/collective/nccl/trial.h"
#include "server/daemon/collectives.h"
#include "server/device/devices.h"

namespace shardd {

// For the process of a trial, its devices included; it is ended then. Kubernetes' startup probe waits 60 s for all.
inline constexpr absl::Duration kTrialLimit = absl::Seconds(25);

// By the file, else by a trial, for which it blocks. One that takes over goes by the file of the daemon before, made by
// whatever version: the sums of its jobs stay what they were. REQUIRES: two GPUs.
CollectiveChoice ChooseByTrial(const CollectiveFlags& flags, const Devices& made, const NcclLibrary& library);

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_COLLECTIVE_TRIAL_H_
