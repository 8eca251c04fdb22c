#include "common/shm/daemon_page.h"

namespace shardd {
namespace {

// Every word that counts within an epoch and that somebody waits for. `epoch` itself is none.
template <typename Visit>
void VisitCounts(DaemonPageView view, Visit visit) {
  DaemonPage& page = view.page();
  for (TimelineWord* word : {&page.version, &page.consumed, &page.full_params, &page.reduced, &page.reducing,
                             &page.passes, &page.passes_issued, &page.snapshots_whole, &page.hand_ins}) {
    visit(*word);
  }
  for (int64_t s = 0; s < view.slots(); ++s) {
    visit(view.slot(s).released);
    visit(view.slot(s).issued);
  }
  for (int64_t g = 0; g < view.groups(); ++g) {
    visit(view.group(g).unsharded);
    visit(view.group(g).issued);
  }
}

}  // namespace

void BeginDaemonPage(DaemonPageView page, uint64_t epoch, int protocol_version) {
  const uint64_t begin = TimelineValue(epoch, 0);
  page.page().magic = DaemonPage::kMagic;
  page.page().protocol_version = static_cast<uint64_t>(protocol_version);
  page.page().epoch.store(begin);
  VisitCounts(page, [begin](TimelineWord& word) { word.store(begin); });
}

void PoisonDaemonPage(DaemonPageView page, uint64_t epoch, const std::atomic<uint32_t>* waiting) {
  const uint64_t value = TimelineValue(epoch, 0);
  TimelineStore(page.page().epoch, value, nullptr);
  VisitCounts(page, [value, waiting](TimelineWord& word) { TimelineStore(word, value, waiting); });
}

}  // namespace shardd
