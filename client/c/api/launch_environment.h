#ifndef SHARDD_CLIENT_C_API_LAUNCH_ENVIRONMENT_H_
#define SHARDD_CLIENT_C_API_LAUNCH_ENVIRONMENT_H_

#include "absl/status/statusor.h"
#include "client/c/session/control.h"

namespace shardd {

// Who a launcher says that this process is. One launcher's word counts and no mixture of two: the first of torchrun's
// variables (which others and scripts set, too), Open MPI's (OMPI_COMM_WORLD_*), those of MPICH's and Intel's mpirun
// (PMI_*, MPI_LOCAL*) and srun's (SLURM_*, of a job step) that are there. mpirun within a Slurm allocation comes before
// srun, by which it starts its own daemons.
struct LaunchEnvironment {
  int rank = -1;                    // RANK, else LOCAL_RANK where all ranks are on this node; -1: neither
  int local_rank = -1;              // LOCAL_RANK; -1: not set
  int node = -1;                    // SHARDD_NODE, else GROUP_RANK, else the launcher's; -1: neither
  int world_size = 0;               // WORLD_SIZE; 0: not set
  int local_world_size = 0;         // LOCAL_WORLD_SIZE; 0: not set
  int grace_ms = 0;                 // SHARDD_GRACE_MS; 0: not set
  int daemon_wait_ms = 0;           // SHARDD_DAEMON_WAIT_MS; 0: not set
  Control control = Control::kAny;  // SHARDD_CONTROL
};
// INVALID_ARGUMENT naming a variable that is no number in range, or no word that it may be.
absl::StatusOr<LaunchEnvironment> ReadLaunchEnvironment();

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_API_LAUNCH_ENVIRONMENT_H_
