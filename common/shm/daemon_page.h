#ifndef SHARDD_COMMON_SHM_DAEMON_PAGE_H_
#define SHARDD_COMMON_SHM_DAEMON_PAGE_H_

#include <atomic>
#include <cstdint>

#include "common/shm/session_view.h"

namespace shardd {

// Both ends of a daemon page's life, for whoever writes it: the daemon, or a client whose words are told.

// Writes the first words: those of `epoch`, with nothing done. REQUIRES: the memory is zero, and nobody reads it yet.
void BeginDaemonPage(DaemonPageView page, uint64_t epoch, int protocol_version);

// Lets everyone who waits go: all words move to `epoch`, which is later than the page's. `waiting`: ClientPage::waiting
// of the same session.
void PoisonDaemonPage(DaemonPageView page, uint64_t epoch, const std::atomic<uint32_t>* waiting);

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_DAEMON_PAGE_H_
