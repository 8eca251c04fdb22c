// Compiled when CMake is run: whether the headers of NVIDIA's that it has found are what the source wants.

#include "common/cuda/driver_api.h"
#include "server/collective/nccl/nccl_api.h"

int main() {}
