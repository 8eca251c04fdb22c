#include "server/service/write_turns.h"

#include "absl/time/clock.h"

namespace shardd {

void WriteTurns::LimitEnd(absl::Duration patience, std::function<void()> cancel) {
  if (finished_) return;
  patience_.Set(absl::ToChronoTime(absl::Now() + patience), [cancel = std::move(cancel)](bool expired) {
    if (expired) cancel();
  });
}

}  // namespace shardd
