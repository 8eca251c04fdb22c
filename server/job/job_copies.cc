// Copies of values between trainers' staging and the job's slabs. A GPU that hangs may keep one for seconds, and what
// is put back of a large model takes as long, so a thread of their own, the copier, makes them. The rank that has asked
// for one is held meanwhile: its commands wait in its ring, in their order, and everybody else goes on. What is copied
// in less time than waking the copier takes is copied at once, behind nothing: models have thousands of small
// parameters.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"

namespace shardd {
namespace {

constexpr int64_t kUndoChunkBytes = int64_t{64} << 10;
constexpr int64_t kCopiedAtOnceBytes = int64_t{64} << 10;
constexpr absl::Duration kCopyLimit = absl::Seconds(60);

}  // namespace

absl::Status JobCore::CopyFor(Session* session, const Copying& copying, CopyValues copy) {
  // A copy that is under way may be of the same bytes; of devices' memory none is made without waiting for the device.
  if (copying.slab->on_host() && copying.size_bytes <= kCopiedAtOnceBytes && copies_under_way_ == 0) {
    return copy();
  }
  const bool of_gradient = copying.of_gradient;
  session->held = true;
  gradient_work_ += of_gradient ? 1 : 0;
  CopyOffLoop(std::move(copy), [this, of_gradient, id = session->id(), epoch = epoch_](absl::Status status) {
    gradient_work_ -= of_gradient ? 1 : 0;
    // Of an epoch that has ended, the loss of the device alone means anything.
    if (!status.ok() && (epoch == epoch_ || absl::IsDataLoss(status))) {
      Abort(std::move(status), {});
      return;
    }
    if (Session* held = FindSession(id); held != nullptr) {
      Release(held);
    }
  });
  return absl::OkStatus();
}

void JobCore::CopyOffLoop(CopyValues copy, std::function<void(absl::Status)> then) {
  ++copies_under_way_;
  copier_->Post([self = shared_from_this(), copy = std::move(copy), then = std::move(then)] {
    self->CopierGoesOn();
    self->loop_->Post([self, then, status = copy()] {
      --self->copies_under_way_;
      then(status);
    });
    self->copier_moved_ns_.store(0, std::memory_order_relaxed);
  });
}

void JobCore::CopierGoesOn() { copier_moved_ns_.store(absl::ToUnixNanos(MonotonicNow()), std::memory_order_relaxed); }

// A copy has a limit of its own, so this is for a driver that does not return: the copier is stuck in a piece of this
// job's, and whatever the job asks it for next would be too. Copies that only wait for others' have not begun.
absl::Status JobCore::CheckCopies(absl::Time now) const {
  const int64_t moved_ns = copier_moved_ns_.load(std::memory_order_relaxed);
  if (moved_ns == 0 || now - absl::FromUnixNanos(moved_ns) <= kCopyLimit) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat("a copy of its values has not ended after ", absl::FormatDuration(kCopyLimit),
                                          ": a GPU's driver does not return (devices ", device_name(0), " to ",
                                          device_name(world_size() - 1), "); restart the daemon"));
}

void JobCore::Release(Session* session) {
  session->held = false;
  session->last_progress_time = MonotonicNow();
  if (std::exchange(session->consumes_when_released, false)) {
    session->PublishConsumed();
  }
  for (auto& closure : std::exchange(session->when_released, {})) {
    loop_->Post(std::move(closure));
  }
}

absl::Status JobCore::Clear(const Written& written, int64_t numel) {
  return written.slab->Zero(written.offset_bytes, numel * written.element_bytes);
}

// Each chunk is kept once, as it was before the first write: never more than the slabs themselves.
absl::Status JobCore::SaveForUndo(const JobSlab* slab, int64_t offset_bytes, int64_t size_bytes) {
  for (int64_t chunk = offset_bytes / kUndoChunkBytes; chunk * kUndoChunkBytes < offset_bytes + size_bytes; ++chunk) {
    const int64_t begin = chunk * kUndoChunkBytes;
    const int64_t size = std::min(kUndoChunkBytes, slab->size_bytes() - begin);
    if (undo_.count({slab, chunk}) == 0) {
      std::string old(static_cast<size_t>(size), '\0');
      SHARDD_RETURN_IF_ERROR(slab->Read(begin, old.data(), size));
      undo_.emplace(std::pair(slab, chunk), std::move(old));
      undo_bytes_ += size;
    }
  }
  return absl::OkStatus();
}

absl::Status JobCore::TakeBack() {
  absl::Status status;
  for (const auto& [place, bytes] : undo_) {
    CopierGoesOn();
    status.Update(place.first->Write(place.second * kUndoChunkBytes, bytes.data(), static_cast<int64_t>(bytes.size())));
  }
  ForgetUndo();
  return status;
}

void JobCore::ForgetUndo() {
  undo_.clear();
  undo_bytes_ = 0;
}

void JobCore::UndoWrites() {
  for (const auto& [param, count] : undo_counts_) {
    step_counts_[param] = count;
  }
  undo_counts_.clear();
  if (!std::exchange(undo_kept_, false)) {
    return;
  }
  // Nobody is to read what is half put back: ranks that are here are held, others cannot attach (AddSession).
  undoing_ = true;
  for (const auto& session : sessions_) {
    if (session != nullptr) {
      session->held = true;
    }
  }
  CopyOffLoop([this] { return TakeBack(); },
              [this](const absl::Status& status) {
                undoing_ = false;
                if (!status.ok()) {
                  Close(absl::StrCat("take back what was not committed: ", status.message()));
                  return;
                }
                for (const auto& session : sessions_) {
                  if (session != nullptr && session->held) {
                    Release(session.get());
                  }
                }
                if (absl::Status granted = MaybeGrantFullParams(); !granted.ok()) {
                  Abort(std::move(granted), {});
                }
              });
}

}  // namespace shardd
