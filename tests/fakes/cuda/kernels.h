#ifndef SHARDD_TESTS_FAKES_CUDA_KERNELS_H_
#define SHARDD_TESTS_FAKES_CUDA_KERNELS_H_

#include "tests/fakes/cuda/machine.h"

namespace shardd::fake_cuda {

// The kernels of server/device/cuda/kernels.h, computed by the CPU's (common/tensor), which are their reference. Each
// looks first whether its GPU reaches what it reads and writes, and whether pointers are aligned.
void AddReferenceKernels(Machine& machine);

}  // namespace shardd::fake_cuda

#endif  // SHARDD_TESTS_FAKES_CUDA_KERNELS_H_
