// The issuer thread of a CudaDevice, and the driver's callbacks. The mutex is never held over a call: the driver may
// wait inside it for a host function, which needs the mutex.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/shm/trace_ring.h"
#include "server/device/cuda/cuda_device.h"
#include "server/device/ops/check.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

// Operations of one stream before the next stream's turn; they share one lock of the mutex.
constexpr size_t kBatch = 16;
// Besides its operations a work may put a begin, four credit marks (one per quarter of the limit) and an end into the
// queue.
constexpr int kMarks = 6;

const NormOp* AsNorm(const DeviceOp& op) {
  const NormOp* const norm = std::get_if<NormOp>(&op);
  return norm != nullptr && norm->numel > 0 ? norm : nullptr;
}

}  // namespace

void CudaDevice::Issue() {
  NameThread(name());
  const absl::Status entered = engine_->EnterThread();
  absl::MutexLock lock(&mutex_);
  if (!entered.ok()) LoseLocked(entered);
  while (!shutdown_) {
    const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      if (shutdown_) return true;
      for (int i = 0; i < kStreamCount; ++i) {
        if (IssuableLocked(i)) return true;
      }
      return false;
    };
    // Only here does work become outstanding, so without any there is nothing to check meanwhile.
    mutex_.AwaitWithTimeout(absl::Condition(&ready), OutstandingLocked() ? check_interval_ : absl::InfiniteDuration());
    if (const int chosen = shutdown_ ? -1 : ChooseLocked(); chosen >= 0) IssueSome(chosen);
    if (OutstandingLocked() && absl::Now() - last_check_ >= check_interval_) AskWhetherLost();
  }
  const absl::Time limit = absl::Now() + hang_limit_;
  CancelQueued();
  while (OutstandingLocked()) {
    const auto drained = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !OutstandingLocked(); };
    if (!mutex_.AwaitWithTimeout(absl::Condition(&drained), check_interval_)) AskWhetherLost();
    if (absl::Now() > limit && OutstandingLocked()) {
      LoseLocked(absl::DeadlineExceededError(absl::StrCat(
          "it hangs: work that it had when it was shut down has not ended after ", absl::FormatDuration(hang_limit_))));
      LogError(lost_.message());
    }
  }
  issuer_runs_ = false;
}

bool CudaDevice::IssuableLocked(int stream) const {
  const Stream& s = streams_[stream];
  if (s.queued.empty()) return false;
  const Entry& entry = s.queued.front();
  return !entry.status.ok() || entry.next_op == entry.work.ops.size() ? HasCreditLocked(s, 0)
                                                                      : MayIssueLocked(s, entry, entry.next_op, 0);
}

bool CudaDevice::HasCreditLocked(const Stream& s, int calls) const {
  return s.calls == 0 || s.calls + calls + kMarks <= max_calls_;
}

bool CudaDevice::MayIssueLocked(const Stream& s, const Entry& entry, size_t index, int calls_before) const {
  const DeviceOp& op = entry.work.ops[index];
  // `calls_before` belong to this batch. With none, and an empty queue, even the longest operation may go.
  const int calls = calls_before + engine_->CallsOf(op);
  if (calls_before > 0 ? s.calls + calls + kMarks > max_calls_ : !HasCreditLocked(s, calls)) return false;
  const NormOp* const norm = AsNorm(op);
  if (norm == nullptr || norm->result == nullptr) return true;
  const bool ours = std::any_of(entry.norms.begin(), entry.norms.end(),
                                [norm](const auto& held) { return held.first == norm->result; });
  // A norm of another work is added to what that one leaves; one work has at most as many as there are slots.
  return ours || entry.norms.size() >= engine_->norm_slots().count() ||
         (norms_in_use_.count(norm->result) == 0 && engine_->norm_slots().available());
}

int CudaDevice::ChooseLocked() {
  for (int i = 0; i < kStreamCount; ++i) {
    const int stream = (next_stream_ + i) % kStreamCount;
    if (!IssuableLocked(stream)) continue;
    next_stream_ = (stream + 1) % kStreamCount;
    return stream;
  }
  return -1;
}

absl::StatusOr<CudaNormSlots::Slot> CudaDevice::SlotLocked(Entry& entry, const DeviceOp& op) {
  const NormOp* const norm = AsNorm(op);
  if (norm == nullptr) return CudaNormSlots::Slot();
  for (const auto& [result, slot] : entry.norms) {
    if (result == norm->result) return slot;
  }
  if (!engine_->norm_slots().available()) {
    return absl::InternalError(
        absl::StrCat("norm: more results in one work than the device has room for (want at most ",
                     engine_->norm_slots().count(), ")"));
  }
  const CudaNormSlots::Slot slot = engine_->norm_slots().Take();
  *slot.host = norm->result->state();
  entry.norms.emplace_back(norm->result, slot);
  norms_in_use_.insert(norm->result);
  return slot;
}

void CudaDevice::IssueSome(int stream) {
  Stream& s = streams_[stream];
  Entry& entry = s.queued.front();
  const StreamId id = static_cast<StreamId>(stream);
  const auto annotate = [&entry](const absl::Status& status, size_t index, absl::string_view fact) {
    return absl::Status(
        status.code(), absl::StrCat("run \"", entry.work.label, "\": operation ", index, fact, ": ", status.message()));
  };
  if (!entry.started) {
    entry.started = true;
    entry.begin_ns = TraceNowNs();
    if (entry.work.timing != nullptr) {
      entry.status = CallHostFunction(&entry, OnBegin);
      if (!lost_.ok()) return;
    }
  }
  const size_t first = entry.next_op;
  std::vector<CudaNormSlots::Slot> slots;
  absl::Status malformed;
  int calls = 0;
  while (entry.status.ok() && malformed.ok() && entry.next_op < entry.work.ops.size() && slots.size() < kBatch) {
    const DeviceOp& op = entry.work.ops[entry.next_op];
    malformed = CudaEngine::Check(op);
    if (malformed.ok() && !MayIssueLocked(s, entry, entry.next_op, calls)) break;
    absl::StatusOr<CudaNormSlots::Slot> slot = malformed.ok() ? SlotLocked(entry, op) : malformed;
    if (!slot.ok()) {
      malformed = annotate(slot.status(), entry.next_op, absl::StrCat(" is malformed on ", name()));
      break;
    }
    slots.push_back(*slot);
    calls += engine_->CallsOf(op);
    ++entry.next_op;
  }
  // The operations that are here now; a work gets no further ones.
  const std::vector<DeviceOp>& ops = entry.work.ops;
  mutex_.Unlock();
  absl::Status status;
  size_t index = first;
  for (; index < first + slots.size(); ++index) {
    status = engine_->Issue(id, ops[index], slots[index - first]);
    if (!status.ok()) break;
  }
  mutex_.Lock();
  entry.calls += calls;
  s.calls += calls;
  entry.calls_since_mark += calls;
  if (status.code() == absl::StatusCode::kDataLoss) return LoseLocked(status);
  if (entry.status.ok()) entry.status = status.ok() ? malformed : annotate(status, index, "");
  while (entry.status.ok() && entry.calls_since_mark >= mark_calls_) {
    entry.calls_since_mark -= mark_calls_;
    entry.status = CallHostFunction(&entry, OnCredit);
    if (!lost_.ok()) return;
  }
  if (!entry.status.ok() || entry.next_op == entry.work.ops.size()) IssueEnd(&entry);
}

void CudaDevice::IssueEnd(Entry* entry) {
  Stream& s = streams_[entry->stream];
  s.issued.splice(s.issued.end(), s.queued, s.queued.begin());
  const absl::Status status = CallHostFunction(entry, OnEnd);
  if (status.ok() || !lost_.ok()) return;
  // Nothing will report when the issued calls have run, so the issuer waits this once.
  mutex_.Unlock();
  const absl::Status drained = engine_->SynchroniseStream(static_cast<StreamId>(entry->stream));
  mutex_.Lock();
  if (!drained.ok()) return LoseLocked(drained);
  if (entry->status.ok()) entry->status = status;
  EndLocked(*entry);
}

absl::Status CudaDevice::CallHostFunction(Entry* entry, cu::HostFunction function) {
  Stream& s = streams_[entry->stream];
  ++entry->host_functions;
  ++entry->calls;
  ++s.calls;
  mutex_.Unlock();
  absl::Status status = engine_->IssueHostFunction(static_cast<StreamId>(entry->stream), function, entry);
  mutex_.Lock();
  if (status.ok()) return status;
  --entry->host_functions;
  --entry->calls;
  --s.calls;
  if (status.code() == absl::StatusCode::kDataLoss) {
    LoseLocked(status);
    return status;
  }
  return absl::Status(status.code(), absl::StrCat("run \"", entry->work.label, "\": ", status.message()));
}

void CudaDevice::OnBegin(void* argument) {
  Entry* const entry = static_cast<Entry*>(argument);
  absl::MutexLock lock(&entry->device->mutex_);
  --entry->host_functions;
  if (!entry->ended) entry->work.timing->begin_ns = TraceNowNs();
}

void CudaDevice::OnCredit(void* argument) {
  Entry* const entry = static_cast<Entry*>(argument);
  CudaDevice* const device = entry->device;
  absl::MutexLock lock(&device->mutex_);
  --entry->host_functions;
  if (entry->ended) return;
  const int calls = device->mark_calls_ + 1;  // including the mark itself
  entry->calls -= calls;
  device->streams_[entry->stream].calls -= calls;
}

void CudaDevice::OnEnd(void* argument) {
  Entry* const entry = static_cast<Entry*>(argument);
  CudaDevice* const device = entry->device;
  absl::MutexLock lock(&device->mutex_);
  --entry->host_functions;
  device->EndLocked(*entry);
}

void CudaDevice::CancelQueued() {
  for (Stream& s : streams_) {
    while (!s.queued.empty()) {
      Entry& entry = s.queued.front();
      if (entry.status.ok() && (entry.next_op < entry.work.ops.size() || !entry.started)) {
        entry.status = CancelledLocked(entry);
      }
      if (entry.started) {
        IssueEnd(&entry);
        continue;
      }
      entry.ended = true;
      s.issued.splice(s.issued.end(), s.queued, s.queued.begin());
    }
  }
}

void CudaDevice::AskWhetherLost() {
  last_check_ = absl::Now();
  for (int i = 0; i < kStreamCount; ++i) {
    if (streams_[i].calls == 0) continue;
    mutex_.Unlock();
    const absl::Status status = engine_->QueryStream(static_cast<StreamId>(i));
    mutex_.Lock();
    // Whatever the error is, the state of this stream is unknown from now on.
    if (!status.ok()) return LoseLocked(status);
  }
}

void CudaDevice::LoseLocked(const absl::Status& why) {
  if (!lost_.ok()) return;
  lost_ = absl::DataLossError(absl::StrCat("device ", name(), " is lost: ", why.message()));
  for (Stream& s : streams_) {
    s.issued.splice(s.issued.end(), s.queued);
    for (Entry& entry : s.issued) {
      if (entry.ended) continue;
      entry.status = absl::DataLossError(absl::StrCat("run \"", entry.work.label, "\": ", lost_.message()));
      EndLocked(entry);
    }
  }
}

}  // namespace shardd
