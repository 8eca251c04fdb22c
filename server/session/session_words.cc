#include "server/session/session_words.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "common/shm/daemon_page.h"
#include "common/shm/timeline.h"
#include "server/loop/core_loop.h"
#include "server/session/session_stream.h"

namespace shardd {

SessionWords::SessionWords(SessionMemoryView view, DaemonPageView page, uint64_t epoch, int protocol_version)
    : view_(view),
      page_(page),
      epoch_(epoch),
      protocol_version_(protocol_version),
      released_(page.slots(), 0),
      issued_(page.slots(), 0) {
  BeginDaemonPage(page_, epoch, protocol_version);
}

void SessionWords::Tell(CoreLoop* loop, std::shared_ptr<SessionStream> stream) {
  told_ = std::make_unique<ToldWords>(loop, std::move(stream), page_.slots(), page_.groups());
}

void SessionWords::Store(TimelineWord& word, uint64_t sequence) {
  TimelineStore(word, TimelineValue(epoch_, sequence), waiting());
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
  Store(page_.page().version, version);
  if (told_ != nullptr) told_->Change().set_version(version);
}

void SessionWords::PublishSlotIssued(int slot) {
  Store(page_.slot(slot).issued, ++issued_[slot]);
  if (told_ != nullptr) told_->ChangeSlot(slot, [&](auto& entry) { entry.set_issued(issued_[slot]); });
}

void SessionWords::PublishSlotReleased(int slot) {
  NoteProgress();
  Store(page_.slot(slot).released, ++released_[slot]);
  if (told_ != nullptr) told_->ChangeSlot(slot, [&](auto& entry) { entry.set_released(released_[slot]); });
}

void SessionWords::PublishUnshardIssued(int group, uint64_t asked, int64_t pool_offset_bytes) {
  GroupEntry& entry = page_.group(group);
  entry.pool_offset_bytes.store(pool_offset_bytes, std::memory_order_relaxed);
  Store(entry.issued, asked);
  if (told_ != nullptr) {
    told_->ChangeGroup(group, [&](auto& told) {
      told.set_pool_offset_bytes(pool_offset_bytes);
      told.set_issued(asked);
    });
  }
}

void SessionWords::PublishUnsharded(int group, uint64_t asked) {
  Store(page_.group(group).unsharded, asked);
  if (told_ != nullptr) told_->ChangeGroup(group, [&](auto& entry) { entry.set_unsharded(asked); });
}

void SessionWords::PublishFullParams() {
  NoteProgress();
  Store(page_.page().full_params, ++full_params_);
  if (told_ != nullptr) told_->Change().set_full_params(full_params_);
}

void SessionWords::PublishPass() {
  NoteProgress();
  Store(page_.page().passes, ++passes_);
  if (told_ != nullptr) told_->Change().set_passes(passes_);
}

void SessionWords::PublishPassIssued() {
  Store(page_.page().passes_issued, ++passes_issued_);
  if (told_ != nullptr) told_->Change().set_passes_issued(passes_issued_);
}

void SessionWords::PublishSnapshotBegun() { Store(page_.page().snapshots_begun, ++snapshots_begun_); }

void SessionWords::PublishSnapshotWhole() {
  if (poisoned_) return;
  NoteProgress();
  Store(page_.page().snapshots_whole, snapshots_begun_);
}

void SessionWords::PublishHandIn() {
  NoteProgress();
  Store(page_.page().hand_ins, ++hand_ins_);
  if (told_ != nullptr) told_->Change().set_hand_ins(hand_ins_);
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
    Store(page_.page().reducing, reducing_);
    if (told_ != nullptr) told_->Change().set_reducing(reducing_);
  }
}

void SessionWords::PublishReduced(int closed) {
  if (const uint64_t reduced = CountClosed(closed); reduced > reduced_) {
    reduced_ = reduced;
    NoteProgress();
    Store(page_.page().reduced, reduced_);
    if (told_ != nullptr) told_->Change().set_reduced(reduced_);
  }
}

void SessionWords::PublishOthersGave(int backward) {
  if (const uint64_t number = backwards_before_step_ + static_cast<uint64_t>(backward) + 1; number > others_gave_) {
    others_gave_ = number;
    Store(page_.page().others_gave, others_gave_);
    if (told_ != nullptr) told_->Change().set_others_gave(others_gave_);
  }
}

int SessionWords::BackwardOfStep(uint64_t closed) const {
  constexpr uint64_t kMost = std::numeric_limits<int>::max();
  return closed < backwards_before_step_ ? -1 : static_cast<int>(std::min(closed - backwards_before_step_, kMost));
}

void SessionWords::SetAwake(bool awake) { page_.page().awake.store(awake ? 1 : 0, std::memory_order_seq_cst); }

void SessionWords::Poison(uint64_t epoch) {
  poisoned_ = true;
  if (told_ != nullptr) told_->Change().set_epoch(epoch);
  PoisonDaemonPage(page_, epoch, waiting());
}

}  // namespace shardd
