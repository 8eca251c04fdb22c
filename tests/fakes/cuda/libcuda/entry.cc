// What a program meets that looks for libcuda.so.1: the functions of calls.h under their own names, cuGetProcAddress,
// and a machine as the environment describes it, made by cuInit.

#include <cstring>
#include <mutex>

#include "tests/fakes/cuda/calls.h"
#include "tests/fakes/cuda/kernels.h"
#include "tests/fakes/cuda/libcuda/environment.h"

namespace shardd::fake_cuda {
namespace {

// Never destroyed: streams run until the process ends, as a GPU does.
CUresult Make() {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (Machine::Get() != nullptr) return CUDA_SUCCESS;  // another thread was first
  auto* const machine = new Machine(OptionsFromEnvironment());
  AddReferenceKernels(*machine);
  FailFromEnvironment(*machine);
  return CUDA_SUCCESS;
}

__attribute__((constructor)) void OnLoad() { MakeMachineAtInit(Make); }

}  // namespace

extern "C" {

__attribute__((visibility("default"))) extern const cu::DriverKernels shardd_driver_kernels;
const cu::DriverKernels shardd_driver_kernels = {kFatbinMagic, sizeof(kFatbinMagic)};

// Of every function one version, the one that driver_api.h names; as NVIDIA's, it is there for whoever asks for that
// one or a later one.
__attribute__((visibility("default"))) CUresult cuGetProcAddress_v2(const char* name, void** function, int version,
                                                                    cuuint64_t, CUdriverProcAddressQueryResult* query) {
  if (name == nullptr || function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *function = nullptr;
  int since = 0;
#define SHARDD_FAKE_FIND(known, introduced)              \
  if (std::strcmp(name, "cu" #known) == 0) {             \
    *function = reinterpret_cast<void*>(&Driver::known); \
    since = introduced;                                  \
  }
  SHARDD_CU_FUNCTIONS(SHARDD_FAKE_FIND)
#undef SHARDD_FAKE_FIND
  if (std::strcmp(name, "cuGetProcAddress") == 0) {
    *function = reinterpret_cast<void*>(&cuGetProcAddress_v2);
    since = cu::kApiVersion;
  }
  CUdriverProcAddressQueryResult result =
      *function == nullptr ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
  if (*function != nullptr && version < since) {
    *function = nullptr;
    result = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
  }
  if (query != nullptr) *query = result;
  return *function != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

}  // extern "C"
}  // namespace shardd::fake_cuda
