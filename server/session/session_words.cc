#include "server/session/session_words.h"

#include <algorithm>
#include <limits>

#include "common/shm/timeline.h"
#include "server/loop/core_loop.h"

namespace shardd {

SessionWords::SessionWords(SessionMemoryView view, DaemonPageView page, uint64_t epoch, int protocol_version)
    : view_(view),
      page_(page),
      epoch_(epoch),
      protocol_version_(protocol_version),
      released_(page.slots(), 0),
      issued_(page.slots(), 0) {
  DaemonPage& daemon_page = page_.page();
  const uint64_t begin = TimelineValue(epoch, 0);
  daemon_page.magic = DaemonPage::kMagic;
  daemon_page.protocol_version = static_cast<uint64_t>(protocol_version);
  daemon_page.epoch.store(begin);
  daemon_page.version.store(begin);
  daemon_page.consumed.store(begin);
  daemon_page.full_params.store(begin);
  daemon_page.passes.store(begin);
  daemon_page.hand_ins.store(begin);
  daemon_page.reduced.store(begin);
  daemon_page.reducing.store(begin);
  for (int64_t s = 0; s < page_.slots(); ++s) {
    page_.slot(s).released.store(begin);
    page_.slot(s).issued.store(begin);
  }
  for (int64_t g = 0; g < page_.groups(); ++g) {
    page_.group(g).unsharded.store(begin);
    page_.group(g).issued.store(begin);
  }
}

void SessionWords::NoteProgress() { last_progress_time_ = MonotonicNow(); }

bool SessionWords::HasDone(uint64_t done) const {
  const uint64_t word = done == 0 ? 0 : view_.page().done.load(std::memory_order_acquire);
  // In this order: a signal that came from what was let go is seen with the word that says so, or after it.
  return done == 0 || (TimelineEpoch(word) == epoch_ && TimelineSequence(word) >= done &&
                       view_.page().is_void.load(std::memory_order_acquire) == 0);
}

void SessionWords::PublishVersion(uint64_t version) {
  NoteProgress();
  if (poisoned_) return;
  TimelineStore(page_.page().version, TimelineValue(epoch_, version), waiting());
}

void SessionWords::PublishSlotIssued(int slot) {
  TimelineStore(page_.slot(slot).issued, TimelineValue(epoch_, ++issued_[slot]), waiting());
}

void SessionWords::PublishSlotReleased(int slot) {
  NoteProgress();
  TimelineStore(page_.slot(slot).released, TimelineValue(epoch_, ++released_[slot]), waiting());
}

void SessionWords::PublishUnshardIssued(int group, uint64_t asked, int64_t pool_offset_bytes) {
  GroupEntry& entry = page_.group(group);
  entry.pool_offset_bytes.store(pool_offset_bytes, std::memory_order_relaxed);
  TimelineStore(entry.issued, TimelineValue(epoch_, asked), waiting());
}

void SessionWords::PublishUnsharded(int group, uint64_t asked) {
  TimelineStore(page_.group(group).unsharded, TimelineValue(epoch_, asked), waiting());
}

void SessionWords::PublishFullParams() {
  NoteProgress();
  TimelineStore(page_.page().full_params, TimelineValue(epoch_, ++full_params_), waiting());
}

void SessionWords::PublishPass() {
  NoteProgress();
  TimelineStore(page_.page().passes, TimelineValue(epoch_, ++passes_), waiting());
}

void SessionWords::PublishPassIssued() {
  TimelineStore(page_.page().passes_issued, TimelineValue(epoch_, ++passes_issued_), waiting());
}

void SessionWords::PublishHandIn() {
  NoteProgress();
  TimelineStore(page_.page().hand_ins, TimelineValue(epoch_, ++hand_ins_), waiting());
}

void SessionWords::EndStepBackwards() {
  PublishReducing(std::numeric_limits<int>::max());
  PublishReduced(std::numeric_limits<int>::max());
  backwards_before_step_ = backwards_;
}

uint64_t SessionWords::CountClosed(int closed) const {
  return backwards_before_step_ +
         std::min<uint64_t>(static_cast<uint64_t>(closed), backwards_ - backwards_before_step_);
}

void SessionWords::PublishReducing(int closed) {
  if (const uint64_t reducing = CountClosed(closed); reducing > reducing_) {
    reducing_ = reducing;
    TimelineStore(page_.page().reducing, TimelineValue(epoch_, reducing_), waiting());
  }
}

void SessionWords::PublishReduced(int closed) {
  if (const uint64_t reduced = CountClosed(closed); reduced > reduced_) {
    reduced_ = reduced;
    NoteProgress();
    TimelineStore(page_.page().reduced, TimelineValue(epoch_, reduced_), waiting());
  }
}

void SessionWords::SetAwake(bool awake) { page_.page().awake.store(awake ? 1 : 0, std::memory_order_seq_cst); }

void SessionWords::Poison(uint64_t epoch) {
  poisoned_ = true;
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
  TimelineStore(page.hand_ins, value, waiting());
  for (size_t s = 0; s < released_.size(); ++s) {
    TimelineStore(page_.slot(static_cast<int64_t>(s)).released, value, waiting());
    TimelineStore(page_.slot(static_cast<int64_t>(s)).issued, value, waiting());
  }
  for (int64_t g = 0; g < page_.groups(); ++g) {
    TimelineStore(page_.group(g).unsharded, value, waiting());
    TimelineStore(page_.group(g).issued, value, waiting());
  }
}

}  // namespace shardd
