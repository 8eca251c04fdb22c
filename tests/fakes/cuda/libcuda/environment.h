#ifndef SHARDD_TESTS_FAKES_CUDA_LIBCUDA_ENVIRONMENT_H_
#define SHARDD_TESTS_FAKES_CUDA_LIBCUDA_ENVIRONMENT_H_

#include "tests/fakes/cuda/machine.h"

namespace shardd::fake_cuda {

// The machine that FAKE_CUDA_* describe (README.md of the folder above). A value that is none ends the process with a
// line that names it: no test is to pass on a machine that it did not ask for.
MachineOptions OptionsFromEnvironment();

// FAKE_CUDA_FAIL and FAKE_CUDA_LOSE_FILE. The latter has a thread, for the life of the process, as `machine`.
void FailFromEnvironment(Machine& machine);

}  // namespace shardd::fake_cuda

#endif  // SHARDD_TESTS_FAKES_CUDA_LIBCUDA_ENVIRONMENT_H_
