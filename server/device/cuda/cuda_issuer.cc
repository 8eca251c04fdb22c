// The issuer thread of a CudaDevice, and the driver's callbacks. The mutex is never held over a call: the driver may
// wait inside it for a host function, which needs the mutex.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/clock/deadline.h"
#include "common/clock/monotonic_now.h"
#include "common/shm/trace_ring.h"
#include "server/device/cuda/cuda_device.h"
#include "server/device/cuda/op_cost.h"
#include "server/device/ops/check.h"
#include "server/device/ops/rest_of_update.h"
#include "server/device/ops/slice.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

// Operations of one stream before the next stream's turn; they share one lock of the mutex.
constexpr size_t kBatch = 16;
// Besides its operations a batch may put a begin, a mark and an end into the queue.
constexpr int kMarks = 3;

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
      for (const Stream& s : streams_) {
        for (const auto& [owner, entries] : s.queued) {
          if (IssuableLocked(s, entries.front())) return true;
        }
      }
      return false;
    };
    // Only here does work become outstanding, so without any there is nothing to check meanwhile.
    mutex_.AwaitWithTimeout(absl::Condition(&ready), OutstandingLocked() ? check_interval_ : absl::InfiniteDuration());
    if (Entry* const chosen = shutdown_ ? nullptr : ChooseLocked(); chosen != nullptr) IssueSome(chosen);
    if (OutstandingLocked() && MonotonicNow() - last_check_ >= check_interval_) AskWhetherLost();
  }
  const Deadline limit = Deadline::In(hang_limit_);
  CancelQueued();
  while (OutstandingLocked()) {
    const auto drained = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !OutstandingLocked(); };
    if (!mutex_.AwaitWithTimeout(absl::Condition(&drained), check_interval_)) AskWhetherLost();
    if (limit.HasPassed() && OutstandingLocked()) {
      LoseLocked(absl::DeadlineExceededError(absl::StrCat(
          "it hangs: work that it had when it was shut down has not ended after ", absl::FormatDuration(hang_limit_))));
      LogError(lost_.message());
    }
  }
  issuer_runs_ = false;
}

bool CudaDevice::SharedLocked() const { return shared_until_ns_ > 0 && TraceNowNs() < shared_until_ns_; }

bool CudaDevice::IssuableLocked(const Stream& s, const Entry& entry) const {
  return !entry.status.ok() || entry.next_op == entry.work.ops.size() ? HasCreditLocked(s, {}, {})
                                                                      : MayIssueLocked(s, entry, {});
}

bool CudaDevice::HasCreditLocked(const Stream& s, Credit before, Credit more) const {
  // With nothing before it, even the longest operation may go.
  const int calls = s.taken.calls + before.calls;
  if (calls > 0 && calls + more.calls + kMarks > max_calls_) return false;
  const int64_t cost_ns = s.taken.cost_ns + before.cost_ns;
  return cost_ns == 0 || cost_ns + more.cost_ns <= kMostQueuedTurns * turn_ns_ || !SharedLocked();
}

int64_t CudaDevice::PieceLocked(const Entry& entry) const {
  const DeviceOp& op = entry.work.ops[entry.next_op];
  int64_t piece = OpExtent(op) - entry.next_element;
  if (const Logged* const logged = LoggedOf(op); logged != nullptr) piece = std::min(piece, logged->place.numel);
  return SharedLocked() ? std::min(piece, CudaOpPiece(op, turn_ns_)) : piece;
}

bool CudaDevice::MayIssueLocked(const Stream& s, const Entry& entry, Credit before) const {
  const DeviceOp& op = entry.work.ops[entry.next_op];
  if (!HasCreditLocked(s, before, {engine_->CallsOf(op), CudaOpCostNs(op, PieceLocked(entry))})) return false;
  const NormOp* const norm = AsNorm(op);
  if (norm == nullptr || norm->result == nullptr) return true;
  const bool ours = std::any_of(entry.norms.begin(), entry.norms.end(),
                                [norm](const auto& held) { return held.first == norm->result; });
  // A norm of another work is added to what that one leaves; one work has at most as many as there are slots.
  return ours || entry.norms.size() >= engine_->norm_slots().count() ||
         (norms_in_use_.count(norm->result) == 0 && engine_->norm_slots().available());
}

CudaDevice::Entry* CudaDevice::ChooseLocked() {
  const auto of = [this](WorkOwner owner, int stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) -> Entry* {
    Stream& s = streams_[stream];
    const auto queued = s.queued.find(owner);
    if (queued == s.queued.end()) return nullptr;
    Entry& entry = queued->second.front();
    return IssuableLocked(s, entry) ? &entry : nullptr;
  };
  Entry* chosen = nullptr;
  const auto ready = [&](WorkOwner owner) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (int i = 0; i < kStreamCount; ++i) {
      if (of(owner, i) != nullptr) return true;
    }
    return false;
  };
  const std::optional<WorkOwner> owner =
      turns_.Next([&](WorkOwner asked) ABSL_NO_THREAD_SAFETY_ANALYSIS { return ready(asked); });
  if (!owner.has_value()) return nullptr;
  for (int i = 0; i < kStreamCount && chosen == nullptr; ++i) {
    const int stream = (next_stream_ + i) % kStreamCount;
    chosen = of(*owner, stream);
    if (chosen != nullptr) next_stream_ = (stream + 1) % kStreamCount;
  }
  return chosen;
}

void CudaDevice::MoveToIssuedLocked(Entry* entry) {
  Stream& s = streams_[entry->stream];
  const WorkOwner owner = entry->work.owner;
  const auto queued = s.queued.find(owner);
  s.issued.splice(s.issued.end(), queued->second, queued->second.begin());
  if (!queued->second.empty()) return;
  s.queued.erase(queued);
  const bool more = std::any_of(streams_.begin(), streams_.end(),
                                [&](const Stream& stream) { return stream.queued.count(owner) > 0; });
  if (!more) turns_.Leave(owner);
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

void CudaDevice::IssueSome(Entry* chosen) {
  Entry& entry = *chosen;
  const int stream = entry.stream;
  Stream& s = streams_[stream];
  const StreamId id = static_cast<StreamId>(stream);
  const auto annotate = [&entry](const absl::Status& status, size_t index, absl::string_view fact) {
    return absl::Status(
        status.code(), absl::StrCat("run \"", entry.work.label, "\": operation ", index, fact, ": ", status.message()));
  };
  if (!entry.started) {
    entry.started = true;
    entry.begin_ns = TraceNowNs();
    if (entry.work.timing != nullptr) {
      ++entry.host_functions;
      ++s.taken.calls;
      ++s.since_mark.calls;
      entry.status = CallHostFunction(stream, OnBegin, &entry);
      if (!lost_.ok()) return;
      if (!entry.status.ok()) {
        --entry.host_functions;
        --s.taken.calls;
        --s.since_mark.calls;
      }
    }
  }
  struct Piece {
    size_t index;
    DeviceOp part;  // of the operation, unless it is the whole
    bool whole;
    CudaNormSlots::Slot slot;
  };
  std::vector<Piece> pieces;
  absl::Status malformed;
  Credit credit;
  while (entry.status.ok() && malformed.ok() && entry.next_op < entry.work.ops.size() && pieces.size() < kBatch) {
    if (credit.cost_ns >= turn_ns_ && SharedLocked()) break;
    const DeviceOp& op = entry.work.ops[entry.next_op];
    malformed = CudaEngine::Check(op);
    if (malformed.ok() && !MayIssueLocked(s, entry, credit)) break;
    absl::StatusOr<CudaNormSlots::Slot> slot = malformed.ok() ? SlotLocked(entry, op) : malformed;
    if (!slot.ok()) {
      malformed = annotate(slot.status(), entry.next_op, absl::StrCat(" is malformed on ", name()));
      break;
    }
    const int64_t extent = OpExtent(op);
    const int64_t count = PieceLocked(entry);
    const bool whole = count == extent;
    pieces.push_back({entry.next_op, whole ? DeviceOp() : SliceOf(op, entry.next_element, count), whole, *slot});
    credit.calls += engine_->CallsOf(op);
    credit.cost_ns += CudaOpCostNs(op, count);
    entry.next_element += count;
    if (entry.next_element >= extent) {
      ++entry.next_op;
      entry.next_element = 0;
    }
  }
  // The operations that are here now; a work gets no further ones.
  const std::vector<DeviceOp>& ops = entry.work.ops;
  mutex_.Unlock();
  absl::Status status;
  size_t index = 0;
  for (const Piece& piece : pieces) {
    index = piece.index;
    status = engine_->Issue(id, piece.whole ? ops[index] : piece.part, piece.slot);
    if (!status.ok()) break;
  }
  mutex_.Lock();
  for (Credit* const to : {&s.taken, &s.since_mark}) {
    to->calls += credit.calls;
    to->cost_ns += credit.cost_ns;
  }
  if (status.code() == absl::StatusCode::kDataLoss) return LoseLocked(status);
  turns_.Charge(entry.work.owner, credit.cost_ns);
  if (entry.status.ok()) entry.status = status.ok() ? malformed : annotate(status, index, "");
  if (!entry.status.ok() || entry.next_op == entry.work.ops.size()) return IssueEnd(&entry);
  // Whoever waits for credit waits for a mark, so none may be left out where nothing else can be issued.
  const bool due = s.since_mark.calls >= mark_calls_ ||
                   (s.since_mark.cost_ns >= kMarkTurns * turn_ns_ && SharedLocked()) || !IssuableLocked(s, entry);
  if (!due || s.since_mark.calls == 0) return;
  entry.status = PlaceMark(stream);
  if (lost_.ok() && !entry.status.ok()) IssueEnd(&entry);
}

void CudaDevice::IssueEnd(Entry* entry) {
  Stream& s = streams_[entry->stream];
  MoveToIssuedLocked(entry);
  ++entry->host_functions;
  ++s.taken.calls;
  ++s.since_mark.calls;
  entry->returns = std::exchange(s.since_mark, {});
  absl::Status status = CallHostFunction(entry->stream, OnEnd, entry);
  if (status.ok() || !lost_.ok()) return;
  status = absl::Status(status.code(), absl::StrCat("run \"", entry->work.label, "\": ", status.message()));
  --entry->host_functions;
  // Nothing will report when the issued calls have run, so the issuer waits this once.
  mutex_.Unlock();
  const absl::Status drained = engine_->SynchroniseStream(static_cast<StreamId>(entry->stream));
  mutex_.Lock();
  if (!drained.ok()) return LoseLocked(drained);
  if (entry->status.ok()) entry->status = status;
  EndLocked(*entry);
}

absl::Status CudaDevice::PlaceMark(int stream) {
  Stream& s = streams_[stream];
  ++s.taken.calls;
  ++s.since_mark.calls;
  marks_.push_back({this, stream, std::exchange(s.since_mark, {}), {}});
  marks_.back().self = std::prev(marks_.end());
  Mark& mark = marks_.back();
  absl::Status status = CallHostFunction(stream, OnMark, &mark);
  if (status.ok() || !lost_.ok()) return status;
  s.since_mark = mark.credit;
  --s.taken.calls;
  --s.since_mark.calls;
  marks_.erase(mark.self);
  return status;
}

absl::Status CudaDevice::CallHostFunction(int stream, CUhostFn function, void* argument) {
  mutex_.Unlock();
  absl::Status status = engine_->IssueHostFunction(static_cast<StreamId>(stream), function, argument);
  mutex_.Lock();
  if (status.code() == absl::StatusCode::kDataLoss) LoseLocked(status);
  return status;
}

void CudaDevice::OnBegin(void* argument) {
  Entry* const entry = static_cast<Entry*>(argument);
  absl::MutexLock lock(&entry->device->mutex_);
  --entry->host_functions;
  if (!entry->ended) entry->work.timing->begin_ns = TraceNowNs();
}

void CudaDevice::OnMark(void* argument) {
  Mark* const mark = static_cast<Mark*>(argument);
  CudaDevice* const device = mark->device;
  absl::MutexLock lock(&device->mutex_);
  if (device->lost_.ok()) {
    Credit& taken = device->streams_[mark->stream].taken;
    taken.calls -= mark->credit.calls;
    taken.cost_ns -= mark->credit.cost_ns;
  }
  device->marks_.erase(mark->self);
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
      Entry& entry = s.queued.begin()->second.front();
      if (entry.status.ok() && (entry.next_op < entry.work.ops.size() || !entry.started)) {
        entry.status = CancelledLocked(entry);
      }
      if (entry.started) {
        IssueEnd(&entry);
        continue;
      }
      entry.ended = true;
      MoveToIssuedLocked(&entry);
    }
  }
}

void CudaDevice::AskWhetherLost() {
  last_check_ = MonotonicNow();
  for (int i = 0; i < kStreamCount; ++i) {
    if (streams_[i].taken.calls == 0) continue;
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
    while (!s.queued.empty()) MoveToIssuedLocked(&s.queued.begin()->second.front());
    for (Entry& entry : s.issued) {
      if (entry.ended) continue;
      entry.status = absl::DataLossError(absl::StrCat("run \"", entry.work.label, "\": ", lost_.message()));
      EndLocked(entry);
    }
    s.taken = {};
    s.since_mark = {};
  }
}

}  // namespace shardd
