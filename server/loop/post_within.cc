#include "server/loop/post_within.h"

#include <atomic>
#include <memory>
#include <utility>

namespace shardd {

void PostWithin(absl::Duration limit, CoreLoop& queue, CoreLoop::Closure closure, CoreLoop& loop,
                CoreLoop::Closure late) {
  auto decided = std::make_shared<std::atomic<bool>>(false);
  loop.Post([limit, &loop, late = std::move(late), decided]() mutable {
    loop.AddTimer(MonotonicNow() + limit, [late = std::move(late), decided]() mutable {
      if (!decided->exchange(true)) {
        late();
      }
    });
  });
  queue.Post([closure = std::move(closure), decided]() mutable {
    if (!decided->exchange(true)) {
      closure();
    }
  });
}

}  // namespace shardd
