#include "server/device/cuda/cuda_device.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "common/shm/trace_ring.h"
#include "common/status/status_macros.h"
#include "server/observe/log.h"

namespace shardd {

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Create(const CudaDriver& driver, int ordinal,
                                                               absl::Span<const unsigned char> kernels,
                                                               const CudaDeviceOptions& options) {
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<CudaEngine> engine, CudaEngine::Create(driver, ordinal, kernels));
  CUdevice device = 0;
  SHARDD_RETURN_IF_ERROR(driver.Check(driver->DeviceGet(&device, ordinal), "cuDeviceGet", absl::StrCat(ordinal)));
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<CudaMemory> memory, CudaMemory::Create(driver, device, options.hang_limit));
  return absl::WrapUnique(new CudaDevice(std::move(engine), std::move(memory), options));
}

CudaDevice::CudaDevice(std::unique_ptr<CudaEngine> engine, std::unique_ptr<CudaMemory> memory,
                       const CudaDeviceOptions& options)
    : engine_(std::move(engine)),
      memory_(std::move(memory)),
      max_calls_(std::max(options.max_queued_calls, 32)),
      mark_calls_(max_calls_ / 4),
      turn_ns_(absl::ToInt64Nanoseconds(options.turn)),
      check_interval_(options.check_interval),
      hang_limit_(options.hang_limit) {
  absl::MutexLock lock(&mutex_);
  issuer_runs_ = true;
  issuer_ = std::thread([this] { Issue(); });
  StartFinisherLocked();
}

CudaDevice::~CudaDevice() {
  Shutdown();
  Join(absl::InfiniteDuration());
  engine_ = nullptr;  // first, because a host function of a lost device may run until then
}

void CudaDevice::Submit(StreamId stream, DeviceWork work) {
  absl::MutexLock lock(&mutex_);
  Stream& s = streams_[static_cast<size_t>(stream)];
  ++s.submitted;
  Entry entry;
  entry.device = this;
  entry.stream = static_cast<int>(stream);
  entry.work = std::move(work);
  if (!shutdown_ && lost_.ok()) {
    const WorkOwner owner = entry.work.owner;
    if (last_owner_.has_value() && !(*last_owner_ == owner)) shared_until_ns_ = TraceNowNs() + kSharedForNs;
    last_owner_ = owner;
    turns_.Enter(owner);
    s.queued[owner].push_back(std::move(entry));
    return;
  }
  entry.status = shutdown_ ? CancelledLocked(entry) : lost_;
  entry.ended = true;
  s.issued.push_back(std::move(entry));
  if (!finisher_runs_) {
    // The last thread takes no more locks: this join only waits for the thread's exit.
    if (finisher_.joinable()) finisher_.join();
    StartFinisherLocked();
  }
}

absl::Status CudaDevice::CancelledLocked(const Entry& entry) const {
  return absl::CancelledError(absl::StrCat("run \"", entry.work.label, "\": device is shut down (device=", name(),
                                           ", ran ", entry.next_op, " of ", entry.work.ops.size(), " operations)"));
}

std::vector<StreamStatus> CudaDevice::Status() const {
  absl::MutexLock lock(&mutex_);
  const int64_t now_ns = TraceNowNs();
  std::vector<StreamStatus> result;
  for (int i = 0; i < kStreamCount; ++i) {
    const Stream& s = streams_[i];
    StreamStatus status;
    status.stream = static_cast<StreamId>(i);
    status.submitted = s.submitted;
    status.done = s.done;
    // In the GPU's order: the first that has not ended is the current one.
    const auto first = std::find_if(s.issued.begin(), s.issued.end(), [](const Entry& e) { return !e.ended; });
    const Entry* current = first == s.issued.end() ? nullptr : &*first;
    for (const auto& [owner, queued] : s.queued) {
      if (current == nullptr && queued.front().started) current = &queued.front();
    }
    int64_t running_ns = 0;
    if (current != nullptr && current->started) {
      status.current = current->work.label;
      running_ns = now_ns - std::max(current->begin_ns, s.last_end_ns);
    }
    status.busy_us = (s.busy_ns + std::max<int64_t>(running_ns, 0)) / 1000;
    result.push_back(std::move(status));
  }
  return result;
}

absl::Status CudaDevice::lost() const {
  absl::MutexLock lock(&mutex_);
  return lost_;
}

void CudaDevice::Shutdown() {
  {
    absl::MutexLock lock(&mutex_);
    shutdown_ = true;
  }
  if (Join(2 * hang_limit_)) return;
  // Leave its works alone: it may be reading them.
  LogError(absl::StrCat("shut down ", name(), ": a call of the driver has not returned after ",
                        absl::FormatDuration(2 * hang_limit_), ": the GPU hangs, and its thread is left behind"));
}

void CudaDevice::StartFinisherLocked() {
  finisher_runs_ = true;
  finisher_ = std::thread([this] { Finish(); });
}

bool CudaDevice::Join(absl::Duration limit) {
  std::thread issuer, finisher;
  {
    absl::MutexLock lock(&mutex_);
    // Wait until both have left, so that of two concurrent callers neither returns while one runs.
    const auto left = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !issuer_runs_ && !finisher_runs_; };
    if (!mutex_.AwaitWithTimeout(absl::Condition(&left), limit)) return false;
    issuer = std::move(issuer_);
    finisher = std::move(finisher_);
  }
  if (issuer.joinable()) issuer.join();
  if (finisher.joinable()) finisher.join();
  return true;
}

void CudaDevice::NameThread(const std::string& thread_name) {
  pthread_setname_np(pthread_self(), thread_name.substr(0, 15).c_str());
  // As in the CPU device: without the right to it, only the wake-up time changes.
  (void)setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), -10);
}

int CudaDevice::EndedLocked() const {
  for (int i = 0; i < kStreamCount; ++i) {
    if (!streams_[i].issued.empty() && streams_[i].issued.front().ended) return i;
  }
  return -1;
}

bool CudaDevice::OutstandingLocked() const {
  return std::any_of(streams_.begin(), streams_.end(), [](const Stream& s) { return s.taken.calls > 0; });
}

void CudaDevice::EndLocked(Entry& entry) {
  if (entry.ended) return;
  Stream& s = streams_[entry.stream];
  entry.ended = true;
  s.taken.calls -= entry.returns.calls;
  s.taken.cost_ns -= entry.returns.cost_ns;
  entry.returns = {};
  if (!entry.started) return;
  const int64_t now_ns = TraceNowNs();
  s.busy_ns += now_ns - std::max(entry.begin_ns, s.last_end_ns);
  s.last_end_ns = now_ns;
  if (entry.work.timing != nullptr) entry.work.timing->end_ns = now_ns;
}

void CudaDevice::FoldNormsLocked(Entry& entry) {
  for (const auto& [norm, slot] : entry.norms) {
    if (entry.status.ok()) norm->set_state(*slot.host);
    norms_in_use_.erase(norm);
    engine_->norm_slots().GiveBack(slot);
  }
  entry.norms.clear();
}

void CudaDevice::Finish() {
  NameThread(absl::StrCat(name(), " done"));
  absl::MutexLock lock(&mutex_);
  while (true) {
    const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return EndedLocked() >= 0 || (shutdown_ && !issuer_runs_);
    };
    mutex_.Await(absl::Condition(&ready));
    const int chosen = EndedLocked();
    if (chosen < 0) break;  // shut down, and all work is done
    Stream& s = streams_[chosen];
    Entries taken;
    taken.splice(taken.begin(), s.issued, s.issued.begin());
    Entry& entry = taken.front();
    FoldNormsLocked(entry);
    DeviceWork work = std::move(entry.work);
    absl::Status status = std::move(entry.status);
    if (entry.host_functions > 0) {
      lost_entries_.splice(lost_entries_.end(), taken);
    }
    ++s.done;
    mutex_.Unlock();
    if (work.done) work.done(std::move(status));
    work = DeviceWork();  // release what `done` holds before the next one, and not under the mutex
    mutex_.Lock();
  }
  finisher_runs_ = false;
}

}  // namespace shardd
