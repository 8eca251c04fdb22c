#include "server/service/session_events.h"

#include <algorithm>
#include <utility>

namespace shardd {

void SessionEvents::Add(v1::SessionEvent event) {
  if (event.has_words()) {
    const auto waits = std::find_if(events_.begin(), events_.end(), [](const auto& e) { return e.has_words(); });
    if (waits != events_.end()) {
      waits->mutable_words()->MergeFrom(event.words());  // entries of maps are replaced, as they are told as a whole
      return;
    }
  } else if (events_.size() >= kMost && !event.has_aborted() && !event.has_detached()) {
    return;
  }
  events_.push_back(std::move(event));
}

v1::SessionEvent SessionEvents::Take() {
  v1::SessionEvent event = std::move(events_.front());
  events_.pop_front();
  return event;
}

}  // namespace shardd
