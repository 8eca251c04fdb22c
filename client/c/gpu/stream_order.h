#ifndef SHARDD_CLIENT_C_GPU_STREAM_ORDER_H_
#define SHARDD_CLIENT_C_GPU_STREAM_ORDER_H_

// Order between a program's CUDA stream and the daemon, without the program's host: waits of the stream for words of
// the daemon's page, signals behind the stream's work in the client's.
//
//   the program's stream    ... kernels  WAIT unsharded  kernels  (event)  kernels ...
//   the library's stream                                          (event)  WRITE done
//
// All signals are written by one stream of the library's own, so that `done` only grows, whatever streams the program
// has. A wait is enqueued only for what nothing that a rank does can hold up any more (`issued` words, page.h), and a
// signal before its record is published, so no two waits wait for each other, also where streams share a queue.
//
// A GPU's wait has no end but its word. So a thread watches those that are outstanding (it calls nothing of the
// driver): when one has taken `timeout`, or the session is over, it moves the words that are waited for to the next
// epoch, and again every millisecond until the streams have drained, because a daemon that is alive may still write.
// What the streams then compute is void, and the session is over: expired() says why.

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "client/c/gpu/graph_words.h"
#include "common/clock/timed_condition.h"
#include "common/cuda/driver.h"
#include "common/shm/page.h"

namespace shardd {

// Thread-compatible; the thread that watches is its own.
class StreamOrder {
 public:
  struct Options {
    const CudaDriver* driver = nullptr;  // outlives this
    int ordinal = 0;
    int rank = 0;
    uint64_t epoch = 0;
    ClientPage* client_page = nullptr;  // pages as long as this lives
    void* daemon_page = nullptr;        // writable
    int64_t daemon_page_bytes = 0;
    absl::Duration timeout;
    std::function<bool()> over;  // the session is; any thread
    absl::Status words;          // not OK: why the pages have no words for a GPU
  };
  // So many waits that are not satisfied, and signals that have not been come to, at most: a GPU's queue is finite, and
  // behind a wait the call that finds it full blocks inside the driver.
  static constexpr size_t kMaxWaits = 32;
  static constexpr uint64_t kMaxSignals = 128;

  // Where the driver has no memory operations for this GPU, or does not take the pages, or these are not shared with
  // the daemon, by_stream() is false and fallback() says why: Signal then waits for the program's stream, and the host
  // for the daemon.
  static absl::StatusOr<std::unique_ptr<StreamOrder>> Create(const Options& options);
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;
  // REQUIRES: Drain was called.
  ~StreamOrder();

  bool by_stream() const { return fallback_.ok(); }
  const absl::Status& fallback() const { return fallback_; }

  // What follows is ordered with `stream` (null: the legacy default stream), and `stream` behind what was before.
  // INVALID_ARGUMENT: it is no stream of the GPU's primary context, or it is cudaStreamPerThread, which is not one
  // stream.
  absl::Status Use(CUstream stream);

  // The stream has been synchronised, and may be destroyed: nothing of it is looked at any more.
  void Forget();

  // Behind all that the program's stream has by now: `done` becomes what is returned. 0: it has been waited for.
  // DEADLINE_EXCEEDED, or OK with 0 once the session is over. `wait` gives the host's waits their slices.
  absl::StatusOr<uint64_t> Signal(const std::string& what, const std::function<absl::Status()>& slice);
  // True while another wait may be enqueued; else the host waits.
  bool MayAwait();
  // What the program's stream gets from now on runs when `word`, of the daemon's page, has come to `value`.
  absl::Status Await(const TimelineWord& word, uint64_t value, std::string what);

  // FAILED_PRECONDITION while the program's stream is being captured: a wait or a signal would be there in every launch
  // of the graph, with the values of today. `what`: the call.
  absl::Status CheckNotCapturing(const char* what) const { return CheckNotCapturing(what, stream_); }

  // CUDA graphs (graph_words.h). Words stay as long as this lives.
  absl::StatusOr<GraphWords*> MakeGraphWords();
  bool FreeGraphWords(GraphWords* words);  // false: a launch is under way
  // In the graph that the program's stream is captured into.
  absl::StatusOr<int> AddGraphWait(GraphWords* words) { return AddToGraph(words, /*wait=*/true); }
  absl::StatusOr<int> AddGraphSignal(GraphWords* words) { return AddToGraph(words, /*wait=*/false); }
  // Has it launched into the program's stream, by a thread of its own: a graph that a GPU's queue cannot hold keeps the
  // driver's call until the GPU has come far enough, which waits for what the caller does next. From then until
  // EndGraph, and longer where that is never called, its waits are let go when the session is over. An error that comes
  // at once is returned, as if it had not been asked for; a later one is launch_status().
  absl::Status LaunchGraph(CUgraphExec exec, GraphWords* words);
  // What the driver has said of it; OK: nothing yet.
  absl::Status launch_status() const;
  // Until the driver's call has returned: DEADLINE_EXCEEDED after `timeout`, and what `slice`, which is called now and
  // then, says. What is enqueued then comes behind it.
  absl::Status AwaitLaunch(const std::function<absl::Status()>& slice);
  void EndGraph();

  // A wait has taken too long and was ended: of no use any more. One load while that is not so.
  bool has_expired() const { return has_expired_.load(std::memory_order_acquire); }
  absl::Status expired() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Until all that was enqueued here has run, and what the program's stream had before it: true; at most `limit`, and
  // until `stop` (null: never) says so.
  // `release`: waits are ended, the session is over. Then nothing may be called any more but this.
  bool Drain(bool release, absl::Duration limit, const std::function<bool()>& stop = nullptr);

 private:
  struct Outstanding {
    TimelineWord* word;
    uint64_t value;
    Deadline deadline;
    std::string what;
  };

  // Outlives what began it, where the driver never gives it back.
  struct GraphLaunch {
    const CudaDriver* driver = nullptr;
    CUcontext context = nullptr;
    CUgraphExec exec = nullptr;
    CUstream stream = nullptr;
    absl::Mutex mutex;
    TimedCondition changed;                                      // status
    absl::optional<absl::Status> status ABSL_GUARDED_BY(mutex);  // once it has returned

    void Return(absl::Status what) ABSL_LOCKS_EXCLUDED(mutex);
    // What the driver has said by the deadline; nullopt: nothing.
    absl::optional<absl::Status> Await(Deadline deadline) ABSL_LOCKS_EXCLUDED(mutex);
  };
  static void* LaunchMain(void* launch);

  explicit StreamOrder(Options options) : options_(std::move(options)), driver_(*options_.driver) {}
  absl::Status CheckNotCapturing(const char* what, CUstream stream) const;
  absl::StatusOr<int> AddToGraph(GraphWords* words, bool wait);
  bool IdleLocked() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return outstanding_.empty() && graph_ == nullptr; }
  absl::Status Init();
  absl::Status InitWords();
  absl::Status Check(CUresult result, const char* call, const char* object) const {
    return driver_.Check(result, call, object, absl::string_view());
  }
  static void* WatchMain(void* self);
  void Watch() ABSL_LOCKS_EXCLUDED(mutex_);
  void PruneLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The event of what both streams have by now.
  absl::Status RecordAll();

  const Options options_;
  const CudaDriver& driver_;
  absl::Status fallback_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUstream signals_ = nullptr;
  CUevent event_ = nullptr;
  bool client_registered_ = false;
  bool daemon_registered_ = false;
  CUdeviceptr done_ = 0;         // ClientPage::done
  CUdeviceptr daemon_page_ = 0;  // as the GPU addresses it
  // Of the caller.
  CUstream stream_ = nullptr;
  bool has_stream_ = false;
  uint64_t signalled_ = 0;
  bool drained_ = false;
  std::list<std::unique_ptr<GraphWords>> graphs_;
  std::shared_ptr<GraphLaunch> launch_;  // the last one; null: none was yet
  pthread_t watcher_ = 0;
  bool watches_ = false;
  // Self-synchronised.
  std::atomic<bool> has_expired_{false};
  // Guarded.
  mutable absl::Mutex mutex_;
  TimedCondition changed_;  // release_, ending_
  std::list<Outstanding> outstanding_ ABSL_GUARDED_BY(mutex_);
  absl::Status expired_ ABSL_GUARDED_BY(mutex_);
  GraphWords* graph_ ABSL_GUARDED_BY(mutex_) = nullptr;  // of the launch under way
  bool release_ ABSL_GUARDED_BY(mutex_) = false;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_GPU_STREAM_ORDER_H_
