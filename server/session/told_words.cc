#include "server/session/told_words.h"

#include "server/loop/core_loop.h"
#include "server/session/session_stream.h"

namespace shardd {

v1::SessionEvent::Words& ToldWords::Change() {
  if (!next_->posted) {
    next_->posted = true;
    loop_->Post([next = next_] {
      next->posted = false;
      next->stream->Send(std::exchange(next->event, v1::SessionEvent()));
    });
  }
  return *next_->event.mutable_words();
}

}  // namespace shardd
