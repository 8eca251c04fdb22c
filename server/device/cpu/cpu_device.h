#ifndef SHARDD_SERVER_DEVICE_CPU_CPU_DEVICE_H_
#define SHARDD_SERVER_DEVICE_CPU_CPU_DEVICE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/device/device.h"
#include "server/turns/turns.h"

namespace shardd {

// A logical device on host memory: one worker thread serves the three streams of all jobs.
//
// The worker takes the first unfinished work of a stream of a job, runs a slice of it (an operation, or a part of a
// large one: about a millisecond), and then chooses again. First it chooses the job whose turn it is, by the worker's
// time (server/turns). Then it chooses the job's stream in the order of StreamId, so that an unshard waits for one
// slice of an optimizer update instead of all of it; a stream that was passed over kMaxPassedOver times in a row is
// next, so that none starves.
//
// Thread-safe.
class CpuDevice final : public Device {
 public:
  // `name` is also the thread's name (at most 15 characters). The thread asks for nice -10, because at nice 0 a daemon
  // thread wakes up a time slice late on busy cores; without the right to that, it runs at nice 0.
  explicit CpuDevice(std::string name);
  CpuDevice(const CpuDevice&) = delete;
  CpuDevice& operator=(const CpuDevice&) = delete;
  // Shuts down. REQUIRES: not called from a `done`.
  ~CpuDevice() override;

  const std::string& name() const override { return name_; }
  // After Shutdown the worker is started again just to run `done`, never the caller's thread, which may hold locks that
  // `done` takes.
  void Submit(StreamId stream, DeviceWork work) override;
  std::vector<StreamStatus> Status() const override;
  // REQUIRES: not called from a `done`.
  void Shutdown() override;

 private:
  // Number of times in a row that a stream with work may be passed over.
  static constexpr int kMaxPassedOver = 16;
  static constexpr int64_t kMostSavedNs = 4'000'000;

  // A work and its progress.
  struct Entry {
    DeviceWork work;
    size_t next_op = 0;
    int64_t next_element = 0;  // within that operation
    bool started = false;
    absl::Status status;  // the first error; later operations are skipped
  };
  struct Stream {
    std::deque<Entry> entries;  // pointers to the first stay valid while others are appended
    int passed_over = 0;
  };
  struct Job {
    std::array<Stream, kStreamCount> streams;
    size_t entries = 0;
  };
  // Per stream, over all jobs.
  struct Facts {
    uint64_t submitted = 0;
    uint64_t done = 0;
    int64_t busy_ns = 0;
    int64_t running_since_ns = 0;    // 0: not running now
    const Entry* current = nullptr;  // the last to run, if unfinished
  };

  void Run();
  // REQUIRES: `job` has work.
  static int ChooseStream(Job& job);
  // Runs one slice of `entry`; returns true if it is finished.
  bool RunSlice(Entry& entry);
  void StartWorkerLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void JoinWorker() ABSL_LOCKS_EXCLUDED(mutex_);

  // Constant after construction.
  const std::string name_;

  // Self-synchronised.
  std::atomic<bool> shutdown_{false};  // written under mutex_

  // Guarded.
  mutable absl::Mutex mutex_;
  std::map<WorkOwner, Job> jobs_ ABSL_GUARDED_BY(mutex_);  // with work
  Turns turns_ ABSL_GUARDED_BY(mutex_){kMostSavedNs};
  std::array<Facts, kStreamCount> facts_ ABSL_GUARDED_BY(mutex_);
  size_t entries_ ABSL_GUARDED_BY(mutex_) = 0;  // of all jobs
  bool worker_runs_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread worker_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_CPU_CPU_DEVICE_H_
