#include "client/c/session/told_words.h"

#include <array>

namespace shardd {
namespace {

std::array<TimelineWord*, 8> WordsOf(DaemonPage& page) {
  return {&page.version, &page.full_params,   &page.reduced,  &page.reducing,
          &page.passes,  &page.passes_issued, &page.hand_ins, &page.consumed};
}

}  // namespace

ToldWords::ToldWords(DaemonPageView page, const std::atomic<uint32_t>* waiting, uint64_t epoch, int protocol_version)
    : page_(page), waiting_(waiting), epoch_(epoch) {
  const uint64_t begin = TimelineValue(epoch, 0);
  page_.page().magic = DaemonPage::kMagic;
  page_.page().protocol_version = static_cast<uint64_t>(protocol_version);
  page_.page().epoch.store(begin);
  for (TimelineWord* word : WordsOf(page_.page())) word->store(begin);
  for (int64_t s = 0; s < page_.slots(); ++s) {
    page_.slot(s).released.store(begin);
    page_.slot(s).issued.store(begin);
  }
  for (int64_t g = 0; g < page_.groups(); ++g) {
    page_.group(g).unsharded.store(begin);
    page_.group(g).issued.store(begin);
  }
}

void ToldWords::Store(TimelineWord& word, uint64_t sequence) const {
  if (sequence != 0 && word.load(std::memory_order_relaxed) < TimelineValue(epoch_, sequence)) {
    TimelineStore(word, TimelineValue(epoch_, sequence), waiting_);
  }
}

void ToldWords::Store(const v1::SessionEvent::Words& told) const {
  DaemonPage& page = page_.page();
  // In the order in which the daemon publishes what belongs together: places before groups, the version before the pass
  // that reads it, what a command does before that it was executed.
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
  Store(page.reducing, told.reducing());
  Store(page.reduced, told.reduced());
  Store(page.version, told.version());
  Store(page.full_params, told.full_params());
  Store(page.passes_issued, told.passes_issued());
  Store(page.passes, told.passes());
  Store(page.hand_ins, told.hand_ins());
  Store(page.consumed, told.consumed());
  Poison(told.epoch());
}

void ToldWords::Poison(uint64_t epoch) const {
  if (epoch <= epoch_) return;
  const uint64_t value = TimelineValue(epoch, 0);
  TimelineStore(page_.page().epoch, value, nullptr);
  for (TimelineWord* word : WordsOf(page_.page())) TimelineStore(*word, value, waiting_);
  for (int64_t s = 0; s < page_.slots(); ++s) {
    TimelineStore(page_.slot(s).released, value, waiting_);
    TimelineStore(page_.slot(s).issued, value, waiting_);
  }
  for (int64_t g = 0; g < page_.groups(); ++g) {
    TimelineStore(page_.group(g).unsharded, value, waiting_);
    TimelineStore(page_.group(g).issued, value, waiting_);
  }
}

}  // namespace shardd
