#ifndef SHARDD_TESTS_FAKES_CUDA_CALLS_H_
#define SHARDD_TESTS_FAKES_CUDA_CALLS_H_

// The driver's functions over a Machine. Each begins with an Enter: is there a machine, may this thread call, is the
// call to fail, is its context current, is the stream one of it.

#include <memory>
#include <vector>

#include "tests/fakes/cuda/machine.h"

namespace shardd::fake_cuda {

// A context is its GPU's number above this, whatever machine: which one it is of, the thread remembers.
inline constexpr uintptr_t kContextBase = 0x100;
inline cu::Context ContextOf(int gpu) {
  return reinterpret_cast<cu::Context>(kContextBase + static_cast<uintptr_t>(gpu));
}
inline int GpuOf(cu::Context context) { return static_cast<int>(reinterpret_cast<uintptr_t>(context) - kContextBase); }

struct ThreadState {
  uint64_t machine = 0;
  std::vector<cu::Context> contexts;
  bool in_host_function = false;
};
ThreadState& ThisThread();

// Members named as the driver's functions without `cu`.
struct Driver {
  // What a call stands on: the machine, and where it needs one, the current context's GPU or the stream.
  struct Call {
    Machine* machine = nullptr;
    cu::Result result = cu::kNotInitialized;
    int gpu = -1;
    std::shared_ptr<Stream> stream;
    explicit operator bool() const { return result == cu::kSuccess; }
  };
  static Call Enter(const char* name);
  static Call EnterContext(const char* name);
  static Call EnterStream(const char* name, cu::Stream stream);
  static cu::Result Enqueue(const Call& call, Stream::Item item);
  // What a stream came to: kSuccess, or what its GPU was lost with.
  static cu::Result Outcome(const Call& call);
  static bool HasGpu(const Call& call, cu::Ordinal device) {
    return device >= 0 && device < call.machine->options_.gpus;
  }
  static std::vector<cu::Context>& Contexts(const Call& call);  // of this thread; the last is current
  static std::shared_ptr<Event> Find(const Call& call, cu::Event event);
  static bool IsWord(const Call& call, cu::DevicePtr address, bool write);

// Under the driver's own symbols, which libcuda/ exports: there is no second set of functions beside these.
#define SHARDD_FAKE_DECLARE(name, parameters) \
  __attribute__((visibility("default"))) static cu::Result name parameters asm("cu" #name);
  SHARDD_CU_FUNCTIONS(SHARDD_FAKE_DECLARE)
#undef SHARDD_FAKE_DECLARE
};

}  // namespace shardd::fake_cuda

#endif  // SHARDD_TESTS_FAKES_CUDA_CALLS_H_
