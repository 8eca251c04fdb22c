#include "client/c/session/told_words.h"

#include "common/shm/daemon_page.h"

namespace shardd {

ToldWords::ToldWords(DaemonPageView page, const std::atomic<uint32_t>* waiting, uint64_t epoch, int protocol_version)
    : page_(page), waiting_(waiting), epoch_(epoch) {
  BeginDaemonPage(page_, epoch, protocol_version);
}

void ToldWords::Store(TimelineWord& word, uint64_t sequence) const {
  if (sequence != 0 && word.load(std::memory_order_relaxed) < TimelineValue(epoch_, sequence)) {
    TimelineStore(word, TimelineValue(epoch_, sequence), waiting_);
  }
}

void ToldWords::Store(const v1::SessionEvent::Words& told) const {
  DaemonPage& page = page_.page();
  // In the order in which the daemon publishes what belongs together: places before groups, the version before the pass
  // that reads it, what others gave before that it is reduced, what a command does before that it was executed.
  for (const auto& [index, group] : told.groups()) {
    if (index < 0 || index >= page_.groups()) continue;
    GroupEntry& entry = page_.group(index);
    entry.pool_offset_bytes.store(group.pool_offset_bytes(), std::memory_order_relaxed);
    Store(entry.issued, group.issued());
    Store(entry.unsharded, group.unsharded());
  }
  for (const auto& [index, slot] : told.slots()) {
    if (index < 0 || index >= page_.slots()) continue;
    Store(page_.slot(index).issued, slot.issued());
    Store(page_.slot(index).released, slot.released());
  }
  Store(page.others_gave, told.others_gave());
  Store(page.reducing, told.reducing());
  Store(page.reduced, told.reduced());
  Store(page.version, told.version());
  Store(page.full_params, told.full_params());
  Store(page.passes_issued, told.passes_issued());
  Store(page.hand_ins, told.hand_ins());  // before the pass that it may come with (EnterPass.has_edits)
  Store(page.passes, told.passes());
  Store(page.consumed, told.consumed());
  Poison(told.epoch());
}

void ToldWords::Poison(uint64_t epoch) const {
  if (epoch <= epoch_) return;
  PoisonDaemonPage(page_, epoch, waiting_);
}

}  // namespace shardd
