#ifndef SHARDD_TESTS_FAKES_CUDA_STREAM_H_
#define SHARDD_TESTS_FAKES_CUDA_STREAM_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "common/cuda/driver_api.h"

namespace shardd::fake_cuda {

// The order in which streams were given what they have. Where they share a queue of their GPU, an operation does not
// run before all that was enqueued before it, into whichever of them, has. Thread-safe.
class SharedQueue {
 public:
  uint64_t Take();  // the next place
  bool IsFirst(uint64_t place) const;
  void Leave(uint64_t place);

 private:
  mutable std::mutex mutex_;
  uint64_t next_ = 0;
  std::set<uint64_t> places_;
};

// A queue and the thread that runs it, in order. Thread-safe.
class Stream {
 public:
  // `item` returns kSuccess, or the error that its GPU is lost with. It may wait, and then has to end when Stopped().
  using Item = std::function<CUresult(Stream&)>;
  struct Options {
    int gpu = 0;
    int priority = 0;
    uint64_t delay_seed = 0;
    size_t queue_limit = 0;
    std::shared_ptr<SharedQueue> shared;  // null: of its own
    std::function<void(CUresult)> lose;   // called when an item fails, on the stream's thread
  };
  explicit Stream(const Options& options);
  ~Stream();  // stops

  int gpu() const { return options_.gpu; }
  int priority() const { return options_.priority; }
  // Blocks while the queue is full. False: stopped, nothing is queued. *length: of the queue, with this one. While the
  // stream is captured: noted for its graph.
  bool Enqueue(Item item, size_t* length);
  bool BeginCapture();                        // false: it is captured already
  bool EndCapture(std::vector<Item>* items);  // false: it is not
  bool Capturing() const;
  bool Idle() const;
  void WaitUntilIdle() const;  // or stopped
  // Nothing that has not started runs any more. Does not wait.
  void Stop();
  // What is queued stays there, the next item first, as long as this holds.
  void Hang(bool hang);
  bool Stopped() const { return stopped_.load(std::memory_order_acquire); }

 private:
  void Run();

  const Options options_;
  std::atomic<bool> stopped_ = false;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  struct Queued {
    Item item;
    uint64_t place;
  };
  std::deque<Queued> queue_;  // the first runs
  bool ending_ = false;
  bool hanging_ = false;
  bool capturing_ = false;
  std::vector<Item> captured_;
  uint64_t random_;
  std::thread thread_;
};

// Recorded: what waits for it goes on when the record has been reached; without a record, at once.
class Event {
 public:
  void Recorded();  // one more record is queued
  void Reached(uint64_t record);
  uint64_t last_record() const;
  bool Done(uint64_t record) const;

 private:
  mutable std::mutex mutex_;
  uint64_t recorded_ = 0;
  uint64_t reached_ = 0;
};

// Calls `satisfied` again and again until it is true or the stream is stopped: the words that a stream waits for are
// written by anybody, in any process, who tells nobody.
void PollUntil(const Stream& stream, const std::function<bool()>& satisfied);

}  // namespace shardd::fake_cuda

#endif  // SHARDD_TESTS_FAKES_CUDA_STREAM_H_
