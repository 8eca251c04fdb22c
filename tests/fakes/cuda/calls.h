#ifndef SHARDD_TESTS_FAKES_CUDA_CALLS_H_
#define SHARDD_TESTS_FAKES_CUDA_CALLS_H_

// The driver's functions over a Machine. Each begins with an Enter: is there a machine, may this thread call, is the
// call to fail, is its context current, is the stream one of it.

#include <memory>
#include <type_traits>
#include <vector>

#include "tests/fakes/cuda/machine.h"

namespace shardd::fake_cuda {

// A context is its GPU's number above this, whatever machine: which one it is of, the thread remembers.
inline constexpr uintptr_t kContextBase = 0x100;
inline CUcontext ContextOf(int gpu) { return reinterpret_cast<CUcontext>(kContextBase + static_cast<uintptr_t>(gpu)); }
inline int GpuOf(CUcontext context) { return static_cast<int>(reinterpret_cast<uintptr_t>(context) - kContextBase); }

struct ThreadState {
  uint64_t machine = 0;
  std::vector<CUcontext> contexts;
  bool in_host_function = false;
};
ThreadState& ThisThread();

// Members named as the driver's functions without `cu`.
struct Driver {
  // What a call stands on: the machine, and where it needs one, the current context's GPU or the stream.
  struct Call {
    Machine* machine = nullptr;
    CUresult result = CUDA_ERROR_NOT_INITIALIZED;
    int gpu = -1;
    std::shared_ptr<Stream> stream;
    explicit operator bool() const { return result == CUDA_SUCCESS; }
  };
  static Call Enter(const char* name);
  static Call EnterContext(const char* name);
  static Call EnterStream(const char* name, CUstream stream);
  static CUresult Enqueue(const Call& call, Stream::Item item);
  // What a stream came to: kSuccess, or what its GPU was lost with.
  static CUresult Outcome(const Call& call);
  static bool HasGpu(const Call& call, CUdevice device) { return device >= 0 && device < call.machine->options_.gpus; }
  static std::vector<CUcontext>& Contexts(const Call& call);  // of this thread; the last is current
  static std::shared_ptr<Event> Find(const Call& call, CUevent event);
  static bool IsWord(const Call& call, CUdeviceptr address, bool write);

// Under the driver's own symbols (cuCtxPushCurrent_v2, where cuda.h says so), which libcuda/ exports: there is no
// second set of functions beside these.
#define SHARDD_FAKE_SYMBOL(function) SHARDD_FAKE_TEXT(function)  // after cuda.h's macros
#define SHARDD_FAKE_TEXT(symbol) #symbol
#define SHARDD_FAKE_DECLARE(name, version)                                                                 \
  __attribute__((visibility("default"))) static std::remove_pointer_t<PFN_cu##name##_v##version> name asm( \
      SHARDD_FAKE_SYMBOL(cu##name));
  SHARDD_CU_FUNCTIONS(SHARDD_FAKE_DECLARE)
#undef SHARDD_FAKE_DECLARE
};

}  // namespace shardd::fake_cuda

#endif  // SHARDD_TESTS_FAKES_CUDA_CALLS_H_
