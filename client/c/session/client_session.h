#ifndef SHARDD_CLIENT_C_SESSION_CLIENT_SESSION_H_
#define SHARDD_CLIENT_C_SESSION_CLIENT_SESSION_H_

// One rank's session in one epoch: the mapped memory, the ring's producer end, bounded waits on the daemon's words, and
// the stream that holds the lease. Knows nothing of groups and steps; those are ClientJob's.
//
// A call on the hot path: Live() (two loads), Send() (a record, a store; sometimes an eventfd write), Reached() (a
// load).

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/c/session/client_stream.h"
#include "client/c/daemon/connect.h"
#include "client/c/gpu/device_slabs.h"
#include "client/c/host/interrupt.h"
#include "client/c/gpu/stream_order.h"
#include "client/c/gpu/trainer_sums.h"
#include "common/plan/plan.h"
#include "common/plan/session_layout.h"
#include "common/shm/session_view.h"
#include "common/shm/slab.h"

namespace shardd {

// Who waits for what, for error texts only. Pointers are borrowed for the call.
struct WaitFor {
  const char* call;                    // "wait_unshard"
  const std::string* group = nullptr;  // its name
  const char* what = "";               // "the parameters of the last step"
};

struct SessionCounters {
  uint64_t doorbells = 0;
  uint64_t waits = 0;
  uint64_t wait_ns = 0;
};

// Thread-compatible, but for what says otherwise. Destroying it cancels the stream and unmaps everything.
class ClientSession {
 public:
  ~ClientSession();
  struct Options {
    const ShardPlan* plan = nullptr;  // outlives the session
    int rank = 0;
    absl::Duration timeout;                // of every wait
    absl::Time deadline;                   // of Open
    const Interrupt* interrupt = nullptr;  // of all waits; outlives the session
  };
  // Opens the stream, waits for `attached`, fetches and maps the descriptors. ABORTED when the epoch advances
  // meanwhile.
  static absl::StatusOr<std::unique_ptr<ClientSession>> Open(const Target& target,
                                                             const std::shared_ptr<grpc::Channel>& channel,
                                                             const v1::AttachRankResponse& attach,
                                                             const Options& options);

  uint64_t epoch() const { return epoch_; }
  uint64_t id() const { return id_; }
  const std::string& token() const { return token_; }
  const ReadOnlyDaemonPageView& daemon_page() const { return daemon_page_; }
  const SessionMemoryView& memory() const { return memory_; }
  // All pointers below are of the host, or, where on_device() is there, of that GPU; but with offload the host's are
  // shards, gradients and optimizer.
  const char* shards() const { return bases_.shards; }
  const char* parameters() const { return bases_.parameters; }  // nullptr: none
  const char* pool() const { return bases_.pool; }              // nullptr: none
  char* gradients() const { return bases_.gradients; }          // nullptr: none
  char* gradient_slots() const { return bases_.gradient_slots; }
  bool on_device() const { return !device_.empty(); }
  int device_ordinal() const { return device_.ordinal(); }  // -1: on the host
  // Mapped with the first call: most trainers never look. nullptr: none, or it cannot be mapped.
  char* optimizer();
  const MappedSlab& shards_slab() const { return shards_; }
  const MappedSlab& parameters_slab() const { return parameters_; }  // may be empty
  const MappedSlab& optimizer_slab() const { return optimizer_; }    // empty until optimizer() was called
  // Into which no store goes outside of windows.
  std::array<const MappedSlab*, 3> watched_slabs() const { return {&shards_, &optimizer_, &parameters_}; }
  // A store at `address` reaches its slab while a window is open.
  bool WindowCovers(const void* address) const;
  // A write window opens or closes: whether stores into the shards, and into state that trainers keep, reach them or
  // fault. Async-signal-safe. REQUIRES: the job's trainers write, and passes read no copies.
  bool SetShardsWritable(bool writable);
  // From now on no store of this process reaches the job's memory on the host through this session, whatever other
  // threads do: it goes to a copy of this process. (client_session_stores.cc) INTERNAL: the kernel refuses, and it is
  // to be called again. Thread-safe.
  absl::Status GiveUpStores();
  // The same for all sessions of this process whose epoch has ended, whichever of its ranks have them. Thread-safe.
  static absl::Status GiveUpStoresOfEnded();
  ClientStream& stream() { return *stream_; }
  const SessionCounters& counters() const { return counters_; }
  // Nothing of the host's may run: the wait is inside a signal handler.
  void set_in_signal(bool in_signal) { in_signal_ = in_signal; }

  // Two loads: the stream has ended or the epoch has advanced; or a GPU's wait was given up.
  bool Over() const {
    return stream_->over() || (order_ != nullptr && order_->has_expired()) ||
           TimelineEpoch(daemon_page_.page().epoch.load(std::memory_order_acquire)) > epoch_;
  }
  // OK while the session lives, else why not; then waits up to 1 s for the explanation to arrive.
  absl::Status Live() { return Over() ? Failure() : absl::OkStatus(); }

  // One load: `word` has come to `sequence` in this epoch. Sequence 0 always has.
  bool Reached(const TimelineWord& word, uint64_t sequence) const {
    const uint64_t value = word.load(std::memory_order_acquire);
    return sequence == 0 || (value >= TimelineValue(epoch_, sequence) && TimelineEpoch(value) == epoch_);
  }
  // The word's sequence if it is of this epoch, else 0.
  uint64_t SequenceOf(const TimelineWord& word) const {
    const uint64_t value = word.load(std::memory_order_acquire);
    return TimelineEpoch(value) == epoch_ ? TimelineSequence(value) : 0;
  }
  // Until Reached, at most the timeout. DEADLINE_EXCEEDED or CANCELLED naming `reason`; else as Live.
  absl::Status Wait(const TimelineWord& word, uint64_t sequence, const WaitFor& reason) {
    return Reached(word, sequence) ? absl::OkStatus() : WaitSlow(word, sequence, reason);
  }

  // Looks at the word for some 20 us, giving the processor to others in between.
  bool Spin(const TimelineWord& word, uint64_t sequence) const;
  // As Wait, at most 50 ms; OK when they have passed.
  absl::Status WaitBriefly(const TimelineWord& word, uint64_t sequence, const char* call);

  // Order by the program's stream (stream_order.h). REQUIRES: on_device().
  absl::Status UseStream(void* stream);
  void ForgetStream() {
    by_stream_ = false;
    if (order_ != nullptr) order_->Forget();
  }
  // Waits of that stream take the place of waits of the host.
  bool stream_ordered() const { return by_stream_ && !waits_on_host_ && order_->by_stream(); }
  // The host waits all the same: in a graph's launch, in which its stream cannot be given anything.
  void set_waits_on_host(bool waits_on_host) { waits_on_host_ = waits_on_host; }
  // REQUIRES: UseStream was called.
  StreamOrder* stream_order() { return order_.get(); }
  // For waits of the host's for its GPU: OK while the session lives, nobody interrupts and the timeout, which begins
  // now, is not over.
  std::function<absl::Status()> GoOn(const WaitFor& reason);
  // Why not, where UseStream was called.
  absl::Status stream_fallback() const { return order_ == nullptr ? absl::OkStatus() : order_->fallback(); }
  // As Wait, for what nothing but kernels looks at: where stream_ordered(), the stream waits, and the host only while
  // too many waits are outstanding. REQUIRES: nothing that a rank does can hold it up any more.
  absl::Status WaitInStream(const TimelineWord& word, uint64_t sequence, const WaitFor& reason);
  // Where trainers add, no stream waits for what comes behind the sums of so many backwards before those are there: in
  // a queue of the GPU that both share, the sum would stand behind the wait. The host waits for them.
  void NeedSums(uint64_t backwards) { needs_sums_ = sums_ == nullptr ? 0 : backwards; }
  // What to put into CommandRecord::done of a record that gives back what the stream's work so far uses. 0: no stream,
  // or the host has waited for it. Before the record changes anything: it can fail.
  absl::StatusOr<uint64_t> SignalDone(const WaitFor& reason);
  // All that the stream was given has run. `release`: the session is over, waits are ended.
  bool DrainStreams(bool release, absl::Duration limit) {
    return order_ == nullptr || order_->Drain(release, limit, [this] { return interrupt().Raised(); });
  }

  // Ring records written so far; the number of the last one.
  uint64_t submitted() const { return submitted_; }
  // Until so many records can be sent without waiting: before a command changes anything, because a wait can fail.
  absl::Status WaitSpace(uint64_t records, const WaitFor& reason);
  // Writes a record. `act`: the daemon must act on it, so it is woken if it sleeps. Waits only while the ring is full.
  absl::Status Send(const CommandRecord& command, bool act, const WaitFor& reason);
  // Wakes the daemon if it sleeps, for records that needed no action.
  void Wake();
  // Until the daemon has copied out record `number` (1 is the first), with its masks and payload.
  absl::Status WaitConsumed(uint64_t number, const WaitFor& reason);

  // One load: somebody traces the job.
  bool tracing() const { return daemon_page_.page().tracing.load(std::memory_order_relaxed) != 0; }
  // Leaves the record out where the daemon has not kept up. Never waits.
  void Trace(TraceRecord record);

  // Ends the session in order; at most until `deadline`.
  absl::Status Detach(bool finished, absl::Time deadline) { return stream_->Detach(finished, deadline, interrupt()); }
  // Cancels the stream; memory stays mapped.
  void Close() { stream_->Close(); }

 private:
  ClientSession() = default;
  absl::Status Map(std::vector<UniqueFd> fds, const v1::AttachRankResponse& attach, const ShardPlan& plan,
                   const DeviceSlabs::Fetch& fetch);
  absl::Status MapOnHost(std::vector<UniqueFd>& fds, const ShardPlan& plan);
  void EnlistStores();
  void DelistStores();
  absl::Status StartSums(const Target& target, const ShardPlan& plan);
  absl::Status Failure();
  const Interrupt& interrupt() const { return in_signal_ ? Interrupt::Never() : *interrupt_; }
  absl::Status WaitSlow(const TimelineWord& word, uint64_t sequence, const WaitFor& reason);
  static std::string Text(const WaitFor& reason);  // "wait_unshard group \"x\": the unshard"
  absl::Status Deadline(const TimelineWord& word, uint64_t sequence, const WaitFor& reason) const;
  void RingDoorbell();
  absl::Status Slice(const TimelineWord& word, uint64_t sequence, absl::Time deadline);

  // Constant after Open.
  uint64_t epoch_ = 0;
  uint64_t id_ = 0;
  std::string token_;
  int rank_ = 0;
  absl::Duration timeout_;
  const Interrupt* interrupt_ = nullptr;
  UniqueFd doorbell_;
  MappedSlab session_slab_;
  MappedSlab daemon_slab_;
  MappedSlab shards_;
  MappedSlab parameters_;
  MappedSlab pool_;
  MappedSlab gradients_;
  UniqueFd optimizer_fd_;  // until it is mapped
  int64_t optimizer_bytes_ = 0;
  bool optimizer_writable_ = false;  // in windows
  bool window_ = false;              // with pass_copies always
  MappedSlab optimizer_;             // changes under stores_mutex_
  bool trainers_write_ = false;
  absl::Mutex stores_mutex_;
  bool stores_given_up_ ABSL_GUARDED_BY(stores_mutex_) = false;
  DeviceSlabs device_;
  struct {
    const char* shards = nullptr;
    const char* parameters = nullptr;
    const char* pool = nullptr;
    char* gradients = nullptr;
    char* gradient_slots = nullptr;
  } bases_;
  SessionMemoryView memory_;
  TraceRecord* trace_ring_ = nullptr;
  ReadOnlyDaemonPageView daemon_page_;
  // Of the caller.
  uint64_t submitted_ = 0;
  uint64_t consumed_seen_ = 0;  // a lower bound of what the daemon has consumed
  uint64_t traced_ = 0;         // records written into the trace ring
  uint64_t trace_lost_ = 0;     // since the last one
  uint64_t rung_at_ = 0;        // `submitted_` when the daemon was last known to be awake
  SessionCounters counters_;
  bool in_signal_ = false;
  std::unique_ptr<StreamOrder> order_;  // null: no stream was named yet
  bool by_stream_ = false;
  bool waits_on_host_ = false;
  std::unique_ptr<TrainerSums> sums_;  // null: the daemon's devices add
  uint64_t needs_sums_ = 0;
  // Last: its reader ends before anything else goes.
  std::unique_ptr<ClientStream> stream_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_SESSION_CLIENT_SESSION_H_
