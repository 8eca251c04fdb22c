#ifndef SHARDD_SERVER_DEVICE_CUDA_CUDA_DEVICE_H_
#define SHARDD_SERVER_DEVICE_CUDA_CUDA_DEVICE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/device/cuda/cuda_memory.h"
#include "server/device/cuda/engine.h"
#include "server/device/device.h"
#include "server/turns/turns.h"

namespace shardd {

struct CudaDeviceOptions {
  // Calls of the driver that one stream may have queued. A GPU's queue is finite (about 1024): if it is full behind a
  // stream that waits, the next call blocks and holds the driver's locks. At least 32.
  int max_queued_calls = 256;
  // How often a GPU with outstanding work is checked for loss: a lost GPU calls nobody back.
  absl::Duration check_interval = absl::Milliseconds(100);
  // How long one copy of memory(), and after Shutdown all work in the GPU's queues, may take before the GPU counts as
  // hung. Far above either on a busy GPU.
  absl::Duration hang_limit = absl::Seconds(10);
  // Where jobs share the GPU: the longest piece of work that one of them issues at a time, as far as its length can be
  // told. Shorter ones cost throughput: each stream stops for some 10 us after two of them.
  absl::Duration turn = absl::Milliseconds(1);
};

// A GPU. One thread (the issuer) makes all calls of the driver and never waits for the GPU: it turns works into calls
// as far as each stream has credit, and the driver runs a host function at each work's end. Another thread runs `done`.
// So the GPU orders what each stream is given, and there is no order between streams.
//
// Jobs take turns (server/turns), and a job's streams within its turn. A stream has work for a few turns at most in the
// GPU's queue, so a job's work waits that long at most, however large another's is. That costs some throughput, so it
// is done while several jobs use the GPU, until one of them has been alone for kSharedFor; the first work of another
// job waits for all that the first one has in the queue.
//
// The GPU must reach the memory that operations name: slabs, or registered host memory. (Pageable memory makes a copy
// block the issuer, as does a copy from host to host; a kernel that touches pageable memory loses the device.) Norms
// may be anywhere.
//
// Device loss (an illegal address, an ECC error, a GPU off the bus, the end of the MPS server): every outstanding and
// later work ends with DATA_LOSS and the driver's text, nothing runs any more, and the content of the GPU's memory is
// undefined. The process needs a new context to use the GPU again: restart it.
//
// WorkTiming uses host functions, which delay their stream by some 10 us, so it is measured only on request.
//
// Thread-safe.
class CudaDevice final : public Device {
 public:
  // Errors as CudaEngine::Create.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Create(const CudaDriver& driver, int ordinal,
                                                            absl::Span<const unsigned char> kernels,
                                                            const CudaDeviceOptions& options = {});
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;
  // Shuts down and releases everything of the driver. REQUIRES: not called from a `done`.
  ~CudaDevice() override;

  const std::string& name() const override { return engine_->name(); }
  DeviceMemory* memory() const override { return memory_.get(); }
  const std::string& description() const { return engine_->description(); }
  void Submit(StreamId stream, DeviceWork work) override;
  std::vector<StreamStatus> Status() const override;
  // Waits for the calls in the GPU's queues; after `hang_limit` their works end with DATA_LOSS. If the issuer itself
  // hangs in a call of the driver, it is leaked after twice that, with its works, which do not end: the destructor
  // would wait for it, so a process that wants to end must not destroy the device. REQUIRES: not called from a `done`.
  void Shutdown() override;
  absl::Status lost() const override;

 private:
  static constexpr int64_t kSharedForNs = 60'000'000'000;
  static constexpr int64_t kMostSavedNs = 4'000'000;
  // A stream may have so many turns' work queued, and says after so many that it has run.
  static constexpr int kMostQueuedTurns = 4;
  static constexpr int kMarkTurns = 2;

  // Of a stream: taken by what is put into the GPU's queue, given back when it has run.
  struct Credit {
    int calls = 0;
    int64_t cost_ns = 0;
  };
  // A place in the GPU's queue: what was issued before it, and since the one before, has run when it is reached.
  struct Mark {
    CudaDevice* device;
    int stream;
    Credit credit;
    std::list<Mark>::iterator self;
  };
  // A work from Submit until its `done`. Does not move, because host functions have pointers to it.
  struct Entry {
    CudaDevice* device;
    int stream;
    DeviceWork work;
    size_t next_op = 0;
    int64_t next_element = 0;  // within that operation
    absl::Status status;       // the first error; later operations are skipped
    std::vector<std::pair<Norm*, CudaNormSlots::Slot>> norms;
    Credit returns;          // with its end
    int host_functions = 0;  // enqueued and not yet run
    bool started = false;
    bool ended = false;  // nothing of it is in the queue any more
    int64_t begin_ns = 0;
    int64_t end_ns = 0;
  };
  using Entries = std::list<Entry>;
  struct Stream {
    std::map<WorkOwner, Entries> queued;  // none is empty; the first of each may be partly issued
    Entries issued;                       // completely in the GPU's queue, or ended
    Credit taken;                         // calls above 0: work is outstanding
    Credit since_mark;                    // of it, what no mark nor end gives back; only the issuer touches it
    uint64_t submitted = 0;
    uint64_t done = 0;
    int64_t busy_ns = 0;
    int64_t last_end_ns = 0;
  };

  CudaDevice(std::unique_ptr<CudaEngine> engine, std::unique_ptr<CudaMemory> memory, const CudaDeviceOptions& options);

  static void NameThread(const std::string& thread_name);

  // Issuer thread.
  void Issue();
  // While jobs share the GPU.
  bool SharedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IssuableLocked(const Stream& s, const Entry& entry) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // For `more`, beside what is queued and `before`, which is about to be.
  bool HasCreditLocked(const Stream& s, Credit before, Credit more) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The next piece of the entry.
  int64_t PieceLocked(const Entry& entry) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MayIssueLocked(const Stream& s, const Entry& entry, Credit before) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<CudaNormSlots::Slot> SlotLocked(Entry& entry, const DeviceOp& op)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The next work of which something can be issued; null: none.
  Entry* ChooseLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void IssueSome(Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);        // unlocks while it calls the driver
  void IssueEnd(Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);         // likewise
  void CancelQueued() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);                 // likewise
  void AskWhetherLost() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);               // likewise
  absl::Status PlaceMark(int stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // likewise
  // likewise
  absl::Status CallHostFunction(int stream, CUhostFn function, void* argument) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // From its job's queue to the issued ones. REQUIRES: it is the first there.
  void MoveToIssuedLocked(Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool OutstandingLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CancelledLocked(const Entry& entry) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LoseLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Run by the driver on a thread of its own, in the order of the stream.
  static void OnBegin(void* entry);
  static void OnMark(void* mark);
  static void OnEnd(void* entry);

  // The thread that runs `done`.
  void Finish();
  int EndedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // a stream whose first issued work has ended, or -1
  void EndLocked(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FoldNormsLocked(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartFinisherLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Both threads. Returns false if they have not ended after `limit`. REQUIRES: shutdown_.
  bool Join(absl::Duration limit) ABSL_LOCKS_EXCLUDED(mutex_);

  // Constant after construction.
  std::unique_ptr<CudaEngine> engine_;  // only the issuer calls it, except name() and description()
  const std::unique_ptr<CudaMemory> memory_;
  const int max_calls_;
  const int mark_calls_;  // credit returns in such steps
  const int64_t turn_ns_;
  const absl::Duration check_interval_;
  const absl::Duration hang_limit_;

  // Guarded.
  mutable absl::Mutex mutex_;
  std::array<Stream, kStreamCount> streams_ ABSL_GUARDED_BY(mutex_);
  std::set<const Norm*> norms_in_use_ ABSL_GUARDED_BY(mutex_);
  std::list<Mark> marks_ ABSL_GUARDED_BY(mutex_);  // not reached yet
  Turns turns_ ABSL_GUARDED_BY(mutex_){kMostSavedNs};
  std::optional<WorkOwner> last_owner_ ABSL_GUARDED_BY(mutex_);  // of what was submitted
  int64_t shared_until_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  Entries lost_entries_ ABSL_GUARDED_BY(mutex_);  // a host function of a lost device may still run
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  bool shutdown_ ABSL_GUARDED_BY(mutex_) = false;
  bool issuer_runs_ ABSL_GUARDED_BY(mutex_) = false;
  bool finisher_runs_ ABSL_GUARDED_BY(mutex_) = false;
  int next_stream_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time last_check_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::thread issuer_ ABSL_GUARDED_BY(mutex_);
  std::thread finisher_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_CUDA_CUDA_DEVICE_H_
