// What a program meets that looks for libcuda.so.1: the functions of calls.h under their own names, cuGetProcAddress,
// and a machine as the environment describes it, made by cuInit.

#include <cstring>
#include <mutex>

#include "tests/fakes/cuda/calls.h"
#include "tests/fakes/cuda/kernels.h"
#include "tests/fakes/cuda/libcuda/environment.h"

namespace shardd::fake_cuda {
namespace {

// As CUdriverProcAddressQueryResult counts.
constexpr int kFound = 0;
constexpr int kSymbolNotFound = 1;
constexpr int kVersionNotSufficient = 2;

// Never destroyed: streams run until the process ends, as a GPU does.
cu::Result Make() {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (Machine::Get() != nullptr) return cu::kSuccess;  // another thread was first
  auto* const machine = new Machine(OptionsFromEnvironment());
  AddReferenceKernels(*machine);
  FailFromEnvironment(*machine);
  return cu::kSuccess;
}

__attribute__((constructor)) void OnLoad() { MakeMachineAtInit(Make); }

}  // namespace

extern "C" {

__attribute__((visibility("default"))) extern const cu::DriverKernels shardd_driver_kernels;
const cu::DriverKernels shardd_driver_kernels = {kFatbinMagic, sizeof(kFatbinMagic)};

// Of one version of the API, the one that is declared in driver_api.h.
__attribute__((visibility("default"))) cu::Result cuGetProcAddress_v2(const char* name, void** function, int version,
                                                                      uint64_t, int* query) {
  if (name == nullptr || function == nullptr) return cu::kInvalidValue;
  *function = nullptr;
#define SHARDD_FAKE_FIND(known, parameters) \
  if (std::strcmp(name, "cu" #known) == 0) *function = reinterpret_cast<void*>(&Driver::known);
  SHARDD_CU_FUNCTIONS(SHARDD_FAKE_FIND)
#undef SHARDD_FAKE_FIND
  if (std::strcmp(name, "cuGetProcAddress") == 0) *function = reinterpret_cast<void*>(&cuGetProcAddress_v2);
  int result = *function == nullptr ? kSymbolNotFound : kFound;
  if (result == kFound && version < cu::kApiVersion) {
    *function = nullptr;
    result = kVersionNotSufficient;
  }
  if (query != nullptr) *query = result;
  return result == kFound ? cu::kSuccess : cu::kNotFound;
}

}  // extern "C"
}  // namespace shardd::fake_cuda
