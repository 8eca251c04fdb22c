#ifndef SHARDD_SERVER_SERVICE_SESSION_EVENTS_H_
#define SHARDD_SERVER_SERVICE_SESSION_EVENTS_H_

#include <cstddef>
#include <deque>

#include "shardd/v1/trainer.pb.h"

namespace shardd {

// Events that wait to be written to a session's client, in order. Bounded, whatever the client reads: of `words` one
// event waits at most, into which the next is merged, and of the others kMost; but the end of a session always does.
// Thread-compatible.
class SessionEvents {
 public:
  static constexpr size_t kMost = 256;

  void Add(v1::SessionEvent event);
  bool empty() const { return events_.empty(); }
  size_t size() const { return events_.size(); }
  // The next one. REQUIRES: not empty().
  v1::SessionEvent Take();
  void Clear() { events_.clear(); }

 private:
  std::deque<v1::SessionEvent> events_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_SESSION_EVENTS_H_
