#include "client/torch/stream_wait.h"

#include <algorithm>
#include <string>
#include <thread>

namespace shardd {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kFirstPause = std::chrono::microseconds(20);
constexpr auto kLongestPause = std::chrono::microseconds(1000);

}  // namespace

Status WaitForStream(const c10::Stream& stream, std::chrono::milliseconds limit, int rank,
                     const std::function<bool()>& interrupted) {
  const Clock::time_point deadline = Clock::now() + limit;
  for (std::chrono::microseconds pause = kFirstPause; !stream.query(); pause = std::min(2 * pause, kLongestPause)) {
    if (interrupted != nullptr && interrupted()) {
      return Status(Code::kCancelled, "wait for the stream: interrupted (rank=" + std::to_string(rank) + ")");
    }
    if (Clock::now() >= deadline) {
      return Status(Code::kDeadlineExceeded, "wait for the stream: the current stream of " + stream.device().str() +
                                                 " has not run what it has within " + std::to_string(limit.count()) +
                                                 " ms: a kernel hangs, or takes longer (stream " +
                                                 std::to_string(stream.id()) + "; rank=" + std::to_string(rank) +
                                                 "); look at what the program enqueued last");
    }
    std::this_thread::sleep_for(pause);
  }
  return Status();
}

}  // namespace shardd
