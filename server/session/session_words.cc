// The words of a session's pages: what its client waits for, and what its device has signalled.

#include <algorithm>
#include <limits>

#include "server/loop/core_loop.h"
#include "server/session/session.h"

namespace shardd {

bool Session::HasDone(uint64_t done) const {
  const uint64_t word = done == 0 ? 0 : view_.page().done.load(std::memory_order_acquire);
  // In this order: a signal that came from what was let go is seen with the word that says so, or after it.
  return done == 0 || (TimelineEpoch(word) == epoch_ && TimelineSequence(word) >= done &&
                       view_.page().is_void.load(std::memory_order_acquire) == 0);
}

void Session::PublishVersion(uint64_t version) {
  last_progress_time = MonotonicNow();
  TimelineStore(page_.page().version, TimelineValue(epoch_, version), waiting());
}

void Session::PublishSlotIssued(int slot) {
  TimelineStore(page_.slot(slot).issued, TimelineValue(epoch_, ++issued_[slot]), waiting());
}

void Session::PublishSlotReleased(int slot) {
  last_progress_time = MonotonicNow();
  TimelineStore(page_.slot(slot).released, TimelineValue(epoch_, ++released_[slot]), waiting());
}

void Session::PublishUnshardIssued(int group, uint64_t asked, int64_t pool_offset_bytes) {
  GroupEntry& entry = page_.group(group);
  entry.pool_offset_bytes.store(pool_offset_bytes, std::memory_order_relaxed);
  TimelineStore(entry.issued, TimelineValue(epoch_, asked), waiting());
}

void Session::PublishUnsharded(int group, uint64_t asked) {
  TimelineStore(page_.group(group).unsharded, TimelineValue(epoch_, asked), waiting());
}

void Session::PublishFullParams() {
  last_progress_time = MonotonicNow();
  TimelineStore(page_.page().full_params, TimelineValue(epoch_, ++full_params_), waiting());
}

void Session::PublishPass() {
  last_progress_time = MonotonicNow();
  TimelineStore(page_.page().passes, TimelineValue(epoch_, ++passes_), waiting());
}

void Session::PublishPassIssued() {
  TimelineStore(page_.page().passes_issued, TimelineValue(epoch_, ++passes_issued_), waiting());
}

bool Session::pass_paused() const {
  return view_.page().pass.load(std::memory_order_acquire) == static_cast<uint32_t>(PassWord::kPaused);
}

bool Session::Overtake() {
  uint32_t paused = static_cast<uint32_t>(PassWord::kPaused);
  return view_.page().pass.compare_exchange_strong(paused, static_cast<uint32_t>(PassWord::kOvertaken));
}

void Session::PublishWindow() {
  last_progress_time = MonotonicNow();
  TimelineStore(page_.page().windows, TimelineValue(epoch_, ++windows_), waiting());
}

void Session::EndStepBackwards() {
  PublishReducing(std::numeric_limits<int>::max());
  PublishReduced(std::numeric_limits<int>::max());
  backwards_before_step_ = backwards_;
}

uint64_t Session::CountClosed(int closed) const {
  return backwards_before_step_ +
         std::min<uint64_t>(static_cast<uint64_t>(closed), backwards_ - backwards_before_step_);
}

void Session::PublishReducing(int closed) {
  if (const uint64_t reducing = CountClosed(closed); reducing > reducing_) {
    reducing_ = reducing;
    TimelineStore(page_.page().reducing, TimelineValue(epoch_, reducing_), waiting());
  }
}

void Session::PublishReduced(int closed) {
  if (const uint64_t reduced = CountClosed(closed); reduced > reduced_) {
    reduced_ = reduced;
    last_progress_time = MonotonicNow();
    TimelineStore(page_.page().reduced, TimelineValue(epoch_, reduced_), waiting());
  }
}

void Session::SetAwake(bool awake) { page_.page().awake.store(awake ? 1 : 0, std::memory_order_seq_cst); }

void Session::Poison(uint64_t epoch) {
  const uint64_t value = TimelineValue(epoch, 0);
  DaemonPage& page = page_.page();
  TimelineStore(page.epoch, value, nullptr);
  TimelineStore(page.version, value, waiting());
  TimelineStore(page.consumed, value, waiting());
  TimelineStore(page.full_params, value, waiting());
  TimelineStore(page.reduced, value, waiting());
  TimelineStore(page.reducing, value, waiting());
  TimelineStore(page.passes, value, waiting());
  TimelineStore(page.passes_issued, value, waiting());
  TimelineStore(page.windows, value, waiting());
  if (sums_ != nullptr) {
    sums_->Poison(epoch);
  }
  for (size_t s = 0; s < released_.size(); ++s) {
    TimelineStore(page_.slot(static_cast<int64_t>(s)).released, value, waiting());
    TimelineStore(page_.slot(static_cast<int64_t>(s)).issued, value, waiting());
  }
  for (size_t g = 0; g < handles.size(); ++g) {
    TimelineStore(page_.group(static_cast<int64_t>(g)).unsharded, value, waiting());
    TimelineStore(page_.group(static_cast<int64_t>(g)).issued, value, waiting());
  }
}

}  // namespace shardd
