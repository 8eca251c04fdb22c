#ifndef SHARDD_CLIENT_C_SESSION_TOLD_WORDS_H_
#define SHARDD_CLIENT_C_SESSION_TOLD_WORDS_H_

#include <cstdint>

#include "common/shm/session_view.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

// Words of this process alone, which stand for those of the daemon's page in a session whose words are told
// (SessionRequest.TellWords): stores what an event says, and wakes who waits. Whoever waits does so as on shared words.
// Does not own the memory. Thread-compatible: one thread stores, any number wait.
class ToldWords {
 public:
  ToldWords() = default;
  // Writes the first words. `waiting`: ClientPage::waiting of the same session. The memory is zero, and outlives this.
  ToldWords(DaemonPageView page, const std::atomic<uint32_t>* waiting, uint64_t epoch, int protocol_version);

  // Stores what has changed, of an event of this session. What is out of range is ignored.
  void Store(const v1::SessionEvent::Words& told) const;
  // Lets every waiter go: all words move to `epoch`. No-op unless it is later than the session's.
  void Poison(uint64_t epoch) const;

 private:
  void Store(TimelineWord& word, uint64_t sequence) const;

  DaemonPageView page_;
  const std::atomic<uint32_t>* waiting_ = nullptr;
  uint64_t epoch_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_SESSION_TOLD_WORDS_H_
