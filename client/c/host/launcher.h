#ifndef SHARDD_CLIENT_C_HOST_LAUNCHER_H_
#define SHARDD_CLIENT_C_HOST_LAUNCHER_H_

#include <cstdint>

namespace shardd {

// When torchrun's own process, which lives through restarts of its workers, was started (ProcessStat::start_ticks).
// 0: this process is no worker of torchrun's, or that one has ended.
//
// It is the parent, or further up where workers are started through a script of the user's: such a script has the
// variables of a worker in its own environment, and the launcher has not. Process 1 adopts whoever has lost its parent,
// so it is the launcher only where it is the same program as this one, as torchrun is where it is all that a container
// runs.
uint64_t LauncherStartTicks();

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_HOST_LAUNCHER_H_
