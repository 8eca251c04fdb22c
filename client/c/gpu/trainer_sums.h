#ifndef SHARDD_CLIENT_C_GPU_TRAINER_SUMS_H_
#define SHARDD_CLIENT_C_GPU_TRAINER_SUMS_H_

// A rank's part of gradient sums, added in its trainer's context (JobConfig.trainer_sums): a thread takes what the
// daemon says (common/shm/sum_ring.h), checks it, and enqueues the daemon's own kernel into a stream of the library's.
//
//   the daemon's loop    record  record  written = n                        (looks at summed every 100 us)
//   this thread                          takes them, enqueues
//   the sums' stream                                 kernel  kernel  WRITE summed = n
//
// What a record reads was signalled before it was written, so nothing in that stream ever waits. Where streams of the
// program share a queue of the GPU with it (CUDA_DEVICE_MAX_CONNECTIONS), a sum may stand behind what they have
// enqueued before; therefore no stream of the program is made to wait for a sum that is not there yet, but its host.

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/clock/timed_condition.h"
#include "common/cuda/driver.h"
#include "common/cuda/reduce.h"
#include "common/cuda/slab.h"
#include "common/shm/sum_ring.h"
#include "common/shm/unique_fd.h"

namespace shardd {

// Memory that records may name, as the rank's GPU addresses it. Bytes are those of the plan.
struct SumMemory {
  char* gradients = nullptr;
  int64_t gradients_bytes = 0;
  char* slots = nullptr;  // the rank's own gradient slots
  int64_t slots_bytes = 0;
  int64_t slab_bytes = 0;  // of the gradient slots of each rank, as they are mapped
  int rank = 0;
  int world_size = 0;
};

// INTERNAL: `record` names memory that is none of `memory`'s, or what no kernel does.
absl::Status CheckSumRecord(const SumRecord& record, const SumMemory& memory);

// This library has the kernel that sums are made with, or its driver has.
bool CanAddGradients();

// The kernel that sums are made with, loaded once for a driver and never unloaded: kernels of other sessions may run.
// UNIMPLEMENTED: this build has none.
absl::StatusOr<CUkernel> LoadReduceKernel(const CudaDriver& driver);

// One session's. The thread is its own; everything else is called by one thread.
class TrainerSums {
 public:
  struct Options {
    const CudaDriver* driver = nullptr;  // outlives this
    CUkernel kernel = nullptr;
    int ordinal = 0;
    uint64_t epoch = 0;
    SumMemory memory;
    const SumRing* ring = nullptr;  // mapped as long as this lives, as is all memory
    SumWords* words = nullptr;
    // The descriptor of a peer's gradient slots; `stopped` ends it early. On the thread, at any time until Stop.
    std::function<absl::StatusOr<UniqueFd>(int rank, const std::function<bool()>& stopped)> fetch;
  };

  // Runs the kernel once, so that nothing of it is loaded later, and starts the thread.
  static absl::StatusOr<std::unique_ptr<TrainerSums>> Start(Options options);
  TrainerSums(const TrainerSums&) = delete;
  TrainerSums& operator=(const TrainerSums&) = delete;
  // REQUIRES: Stop has returned true.
  ~TrainerSums();

  // Takes no more. True: all that was enqueued has run, and nothing is called any more; at most `limit`.
  bool Stop(absl::Duration limit) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  explicit TrainerSums(Options options) : options_(std::move(options)), driver_(*options_.driver) {}
  absl::Status Init();
  absl::Status WarmUp();
  absl::Status Check(CUresult result, const char* call, absl::string_view object) const {
    return driver_.Check(result, call, object);
  }
  static void* Main(void* self);
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // All records that are there; false: the session is over.
  absl::StatusOr<bool> TakeSome();
  absl::Status Enqueue(const SumRecord& record);
  absl::Status Launch(cuda::ReduceArgs args);
  absl::StatusOr<const char*> SlotsOf(int rank);
  absl::Status Signal();
  void Drain();

  const Options options_;
  const CudaDriver& driver_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  CUevent event_ = nullptr;
  int multiprocessors_ = 0;
  bool by_stream_ = false;  // the GPU writes `summed`; else the thread waits for it
  bool registered_ = false;
  CUdeviceptr summed_ = 0;
  pthread_t thread_ = 0;
  bool runs_ = false;
  std::atomic<bool> stop_{false};
  // Of the thread.
  uint64_t taken_ = 0;
  struct Peer {
    uint64_t session_id = 0;
    CudaSlab slots;
  };
  std::vector<Peer> peers_;  // by rank; what a session of theirs had before stays until the end
  std::vector<CudaSlab> former_;
  // Guarded.
  absl::Mutex mutex_;
  TimedCondition changed_;  // ended_
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_GPU_TRAINER_SUMS_H_
