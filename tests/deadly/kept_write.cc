// In the place of common/process/kept_write.cc: SIGKILL at the nth of these calls, of all threads. 0: at none.

#include "common/process/kept_write.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace shardd {
namespace {

int64_t DiesAt() {
  const char* const text = std::getenv("DEADLY_AT");
  return text == nullptr ? 0 : std::atoll(text);
}

}  // namespace

void AtKeptWrite() {
  static const int64_t dies_at = DiesAt();
  static std::atomic<int64_t> calls{0};
  if (++calls != dies_at) return;
  kill(getpid(), SIGKILL);
  while (true) pause();
}

}  // namespace shardd
