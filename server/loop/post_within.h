#ifndef SHARDD_SERVER_LOOP_POST_WITHIN_H_
#define SHARDD_SERVER_LOOP_POST_WITHIN_H_

#include "absl/time/time.h"
#include "server/loop/core_loop.h"

namespace shardd {

// Runs `closure` on `queue`; where that has not begun within `limit`, runs `late` on `loop` instead: one of the two,
// once. Runs neither where the loop that would run it is stopped. Any thread. Both loops outlive what is posted.
void PostWithin(absl::Duration limit, CoreLoop& queue, CoreLoop::Closure closure, CoreLoop& loop,
                CoreLoop::Closure late);

}  // namespace shardd

#endif  // SHARDD_SERVER_LOOP_POST_WITHIN_H_
