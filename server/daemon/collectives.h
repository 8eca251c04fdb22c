#ifndef SHARDD_SERVER_DAEMON_COLLECTIVES_H_
#define SHARDD_SERVER_DAEMON_COLLECTIVES_H_

// What a daemon's program decides about sums of gradients: who makes them between the GPUs of this node (--collective),
// and what adds them over nodes. All that the core knows of NCCL comes from here, so a build without NVIDIA's headers
// (SHARDD_NO_GPUS) differs here, in devices.cc and where node exchanges are made, and nowhere else in the daemon.

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/daemon/core.h"
#include "server/device/devices.h"

namespace shardd {

struct CollectiveFlags {
  std::string collective;    // --collective
  std::string devices;       // --devices: for errors
  std::string nccl_library;  // a name or a path
  bool nccl_windows = false;
  std::string trial_file;              // where a trial's result is kept for later starts
  std::vector<std::string> arguments;  // of this program, for the process of a trial
  bool embedded = false;               // no trial: the program that has started this daemon waits for it
  bool takes_over = false;             // likewise: jobs of the daemon before use the GPUs
};
inline constexpr char kDefaultNcclLibrary[] = "libnccl.so.2";

// Sets what NCCL reads (NcclLibrary::SetEnvironment). REQUIRES: no other thread has started.
void SetCollectiveEnvironment();

// Sets what `options` have of collectives. "auto", with two GPUs or more: NCCL where GPUs do not reach each other's
// memory, or where it is faster by a trial (collective_trial.h); otherwise, and wherever NCCL is not to be had or
// refuses, the GPUs' own copies. INVALID_ARGUMENT: the flag has another value, or asks for NCCL without GPUs; of "nccl"
// alone, errors of NcclLibrary::Load. May block for kTrialLimit.
absl::Status SetCollectives(const CollectiveFlags& flags, const Devices& made, CoreOptions* options);

// All that a process of a trial (collective_trial.h) does: makes the devices, and leaves the result in the file.
absl::Status RunTrial(const CollectiveFlags& flags);

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_COLLECTIVES_H_
