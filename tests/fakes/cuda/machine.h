#ifndef SHARDD_TESTS_FAKES_CUDA_MACHINE_H_
#define SHARDD_TESTS_FAKES_CUDA_MACHINE_H_

// A machine with GPUs, without one: what the driver's functions do, over memfds and threads. It refuses what the real
// driver refuses, and what goes wrong asynchronously there (a kernel's bad address) goes wrong asynchronously here.
//
//   fake_cuda::Machine machine;                        // one at a time in a process
//   const CudaDriver driver(fake_cuda::Table());
//
// Memory is memory.h, streams are stream.h, the kernels of the fat binary kernels.h.
//
// What it does not have: streams that wait for the legacy default stream and it for them (here all streams are as those
// of CU_STREAM_NON_BLOCKING), a default stream per thread, events with timing, kernels that run at the same time within
// a GPU. Streams run their work with a thread each, so works of different streams do overlap.

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/cuda/driver_api.h"
#include "tests/fakes/cuda/late_writes.h"
#include "tests/fakes/cuda/memory.h"
#include "tests/fakes/cuda/stream.h"

namespace shardd::fake_cuda {

// The functions, of whatever Machine there is when they are called; kNotInitialized without one, and in a child of
// fork, as the driver's.
cu::DriverTable Table();

// From now on cuInit of a process that has no Machine calls `make`, which makes one for the life of the process, or
// says why not. Not in a child of a process that has called cuInit: that child has no driver.
void MakeMachineAtInit(CUresult (*make)());

struct MachineOptions {
  int gpus = 1;
  size_t bytes_per_gpu = size_t{64} << 30;
  size_t pinned_bytes = SIZE_MAX;  // of registered host memory, at most
  uint64_t delay_seed = 0;  // not 0: every operation of a stream starts up to 200 us late, by this seed and the stream
  size_t queue_limit = 1024;        // operations that a stream holds; the call that finds it full blocks
  bool one_queue = false;           // the streams of a GPU share one: CUDA_DEVICE_MAX_CONNECTIONS=1
  LateWrites::Options late_writes;  // values that streams write, which land also when the process is killed
  std::string unmap_hold_file;      // cuMemUnmap waits while there is such a file; empty: never
  bool posix_fd = true;
  bool rdma = true;
  bool memops = true;
  bool peers = true;    // GPUs reach each other's memory; without, only cuDeviceCanAccessPeer says so
  std::string dies_in;  // a kernel, copy, memset or word of this name, the nth that streams run, kills the process
  int dies_at = 0;      // halfway; 0: none
  int driver_version = 13000;
  int mps = 0;  // as the attribute; -1: the driver does not know it
  int compute_mode = CU_COMPUTEMODE_DEFAULT;
  bool eager_loading = false;
};

// What a kernel sees of its launch.
struct Launch {
  const void* args;
  const Memory& memory;
  int gpu;
  bool dies;  // halfway
  // How many elements it comes to, of so many.
  int64_t Reached(int64_t numel) const { return dies ? numel / 2 : numel; }
  // Whether the kernel may touch this; a kernel that may not returns false, and its GPU is lost.
  bool Reads(const void* p, size_t size_bytes) const { return memory.Reaches(gpu, p, size_bytes, false); }
  bool Writes(const void* p, size_t size_bytes) const { return memory.Reaches(gpu, p, size_bytes, true); }
};
using KernelFunction = std::function<bool(const Launch&)>;

// A fat binary begins like this; LibraryLoadData takes no other.
inline constexpr unsigned char kFatbinMagic[16] = {0x50, 0xed, 0x55, 0xba, 0x01};

// Thread-safe.
class Machine {
 public:
  explicit Machine(const MachineOptions& options = {});
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
  // Ends what streams still do, waits included.
  ~Machine();
  // The one of this process, or nullptr.
  static Machine* Get();
  // Whether a process that this one was forked from has, or had, one when it forked.
  static bool Inherited();

  // A kernel of every library: its only parameter is a struct of so many bytes, passed by value.
  void AddKernel(const std::string& name, size_t args_bytes, KernelFunction function);

  // The nth call from now (1: the next one) of "cuMemCreate" gives `error` and does nothing.
  void FailCall(const std::string& function, int nth, CUresult error);
  // From now on every call that concerns the GPU gives `error`, and nothing that is in its streams runs any more, host
  // functions included: what a sticky error, or a GPU that fell off the bus, looks like.
  void LoseGpu(int gpu, CUresult error = CUDA_ERROR_ECC_UNCORRECTABLE);

  // All streams that the GPU has: nothing of them goes on, and nothing is said, until this is called with false.
  void HangGpu(int gpu, bool hang = true);
  // The stream of the next copy between host and GPU, which never ends; other streams go on.
  void HangNextHostCopy(int gpu);

  // Of what a stream runs now: whether the process is to die in it. Counts; and that is the end of the process.
  bool DiesIn(const std::string& name);
  [[noreturn]] static void Die();

  // While the options' file is there; "FILE.seen" says that somebody waits.
  void AwaitUnmapping() const;

  int64_t Calls(const std::string& function) const;
  // Copies of memory that the driver does not know: they block the caller.
  int64_t PageableCopies() const;
  // The longest that any stream's queue has been.
  size_t LongestQueue() const;
  std::vector<int> StreamPriorities() const;  // of the streams that exist, as they were made

  struct Live {
    Memory::Live memory;
    size_t contexts = 0, streams = 0, events = 0, libraries = 0;
    bool operator==(const Live&) const = default;
  };
  Live live() const;

 private:
  friend struct Driver;  // calls.h: the functions

  struct Gpu {
    int context_users = 0;
    CUresult lost = CUDA_SUCCESS;
    bool hangs_host_copy = false;
    std::shared_ptr<SharedQueue> queue;  // of all its streams, where they share one
  };
  struct Kernel {
    std::string name;
    size_t args_bytes;
    KernelFunction function;
  };

  void LoseLocked(int gpu, CUresult error);
  std::shared_ptr<Stream> NewStreamLocked(int gpu, int priority, uint64_t seed);
  std::vector<std::shared_ptr<Stream>> StreamsOfLocked(int gpu) const;

  const MachineOptions options_;
  const int pid_;
  const uint64_t number_;  // of machines that this process had: contexts that a thread has of another are not current
  Memory memory_;
  const std::unique_ptr<LateWrites> late_writes_;  // nullptr: at once
  mutable std::mutex mutex_;
  bool initialised_ = false;
  std::map<std::string, int64_t> calls_;
  std::map<std::string, std::pair<int, CUresult>> failures_;  // calls to go, and the error
  int64_t pageable_copies_ = 0;
  int came_to_ = 0;  // of MachineOptions::dies_at
  size_t longest_queue_ = 0;
  std::vector<Gpu> gpus_;
  std::map<std::string, std::unique_ptr<Kernel>> kernels_;
  std::map<CUstream, std::shared_ptr<Stream>> streams_;
  std::map<int, std::shared_ptr<Stream>> legacy_streams_;   // by GPU; the context's own, no object that somebody made
  std::vector<std::shared_ptr<Stream>> destroyed_streams_;  // may still drain
  std::map<CUevent, std::shared_ptr<Event>> events_;
  std::map<CUlibrary, int> libraries_;
  std::map<CUgraph, std::shared_ptr<const std::vector<Stream::Item>>> graphs_;
  std::map<CUgraphExec, std::shared_ptr<const std::vector<Stream::Item>>> execs_;
  uintptr_t next_object_ = 0x1000;
};

}  // namespace shardd::fake_cuda

#endif  // SHARDD_TESTS_FAKES_CUDA_MACHINE_H_
