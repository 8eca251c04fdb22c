#include "server/device/cpu/cpu_device.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/device/cpu/cpu_ops.h"
#include "server/device/ops/check.h"

namespace shardd {
namespace {

int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Starting an operation takes as long as reading this many bytes.
constexpr int64_t kOpBytes = 2048;

}  // namespace

CpuDevice::CpuDevice(std::string name) : name_(std::move(name)) {
  absl::MutexLock lock(&mutex_);
  StartWorkerLocked();
}

CpuDevice::~CpuDevice() {
  Shutdown();
  JoinWorker();  // a late Submit may have started a worker
}

void CpuDevice::Submit(StreamId stream, DeviceWork work) {
  absl::MutexLock lock(&mutex_);
  Job& job = jobs_[work.owner];
  turns_.Enter(work.owner);
  Entry entry;
  entry.work = std::move(work);
  job.streams[static_cast<size_t>(stream)].entries.push_back(std::move(entry));
  ++job.entries;
  ++entries_;
  ++facts_[static_cast<size_t>(stream)].submitted;
  if (!worker_runs_) {
    // The last worker has left Run() and takes no more locks: this join only waits for the thread's exit.
    if (worker_.joinable()) worker_.join();
    StartWorkerLocked();
  }
}

std::vector<StreamStatus> CpuDevice::Status() const {
  absl::MutexLock lock(&mutex_);
  const int64_t now_ns = NowNs();
  std::vector<StreamStatus> result;
  for (int i = 0; i < kStreamCount; ++i) {
    const Facts& s = facts_[i];
    StreamStatus status;
    status.stream = static_cast<StreamId>(i);
    status.submitted = s.submitted;
    status.done = s.done;
    if (s.current != nullptr) status.current = s.current->work.label;
    const int64_t running_ns = s.running_since_ns == 0 ? 0 : now_ns - s.running_since_ns;
    status.busy_us = (s.busy_ns + running_ns) / 1000;
    result.push_back(std::move(status));
  }
  return result;
}

void CpuDevice::Shutdown() {
  {
    absl::MutexLock lock(&mutex_);
    shutdown_.store(true, std::memory_order_relaxed);
  }
  JoinWorker();
}

void CpuDevice::StartWorkerLocked() {
  worker_runs_ = true;
  worker_ = std::thread([this] { Run(); });
}

void CpuDevice::JoinWorker() {
  std::thread worker;
  {
    absl::MutexLock lock(&mutex_);
    // Wait until the worker has left, so that of two concurrent callers neither returns while it runs.
    mutex_.Await(absl::Condition(
        +[](bool* runs) { return !*runs; }, &worker_runs_));
    worker = std::move(worker_);
  }
  if (worker.joinable()) worker.join();
}

int CpuDevice::ChooseStream(Job& job) {
  int chosen = -1;
  for (int i = 0; i < kStreamCount; ++i) {
    const Stream& s = job.streams[i];
    if (s.entries.empty()) continue;
    if (chosen < 0 || (s.passed_over >= kMaxPassedOver && s.passed_over > job.streams[chosen].passed_over)) chosen = i;
  }
  for (int i = 0; i < kStreamCount; ++i) {
    if (i == chosen || job.streams[i].entries.empty()) {
      job.streams[i].passed_over = 0;
    } else {
      ++job.streams[i].passed_over;
    }
  }
  return chosen;
}

bool CpuDevice::RunSlice(Entry& entry) {
  if (shutdown_.load(std::memory_order_relaxed)) {
    if (entry.status.ok() && (entry.next_op < entry.work.ops.size() || !entry.started)) {
      entry.status =
          absl::CancelledError(absl::StrCat("run \"", entry.work.label, "\": device is shut down (device=", name_,
                                            ", ran ", entry.next_op, " of ", entry.work.ops.size(), " operations)"));
    }
    return true;
  }
  // Small operations are run together: choosing again costs a lock, and is due once per slice.
  int64_t budget_bytes = kSliceBytes;
  while (entry.next_op < entry.work.ops.size() && budget_bytes > 0) {
    const DeviceOp& op = entry.work.ops[entry.next_op];
    if (entry.next_element == 0) {
      if (absl::Status status = CheckCpuOp(op); !status.ok()) {
        entry.status =
            absl::Status(status.code(), absl::StrCat("run \"", entry.work.label, "\": operation ", entry.next_op,
                                                     " is malformed: ", status.message(), " (device=", name_, ")"));
        return true;
      }
    }
    const int64_t extent = OpExtent(op);
    const int64_t count = std::min(CpuOpSlice(op), extent - entry.next_element);
    if (count > 0) RunCpuOp(op, entry.next_element, count);
    entry.next_element += count;
    if (entry.next_element >= extent) {
      ++entry.next_op;
      entry.next_element = 0;
    }
    budget_bytes -= CpuOpBytes(op, count) + kOpBytes;
    if (shutdown_.load(std::memory_order_relaxed)) break;
  }
  return entry.next_op >= entry.work.ops.size();
}

void CpuDevice::Run() {
  pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
  // Needs CAP_SYS_NICE or RLIMIT_NICE; without them only the wake-up time changes.
  (void)setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), -10);
  absl::MutexLock lock(&mutex_);
  while (true) {
    mutex_.Await(absl::Condition(
        +[](CpuDevice* self) ABSL_NO_THREAD_SAFETY_ANALYSIS { return self->entries_ > 0 || self->shutdown_.load(); },
        this));
    const std::optional<WorkOwner> owner = turns_.Next(+[](WorkOwner) { return true; });
    if (!owner.has_value()) break;  // shut down, and all work is done
    Job* const job = &jobs_[*owner];
    const int chosen = ChooseStream(*job);
    Facts& facts = facts_[chosen];
    Stream& s = job->streams[chosen];
    Entry& entry = s.entries.front();
    entry.started = !shutdown_.load(std::memory_order_relaxed) || entry.started;
    if (entry.started) facts.current = &entry;
    facts.running_since_ns = NowNs();
    if (entry.work.timing != nullptr && entry.started && entry.work.timing->begin_ns == 0) {
      entry.work.timing->begin_ns = facts.running_since_ns;
    }
    mutex_.Unlock();
    const bool finished = RunSlice(entry);
    mutex_.Lock();
    const int64_t now_ns = NowNs();
    turns_.Charge(*owner, now_ns - facts.running_since_ns);
    facts.busy_ns += now_ns - facts.running_since_ns;
    facts.running_since_ns = 0;
    if (!finished) continue;
    if (entry.work.timing != nullptr) entry.work.timing->end_ns = now_ns;
    if (facts.current == &entry) facts.current = nullptr;
    DeviceWork work = std::move(entry.work);
    absl::Status status = std::move(entry.status);
    s.entries.pop_front();
    --job->entries;
    --entries_;
    ++facts.done;
    if (job->entries == 0) {
      turns_.Leave(*owner);
      jobs_.erase(*owner);
    }
    mutex_.Unlock();
    if (work.done) work.done(std::move(status));
    work = DeviceWork();  // release what `done` holds before the next work starts, and not under the mutex
    mutex_.Lock();
  }
  worker_runs_ = false;
}

}  // namespace shardd
