#include "server/loop/in_parallel.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace shardd {

void InParallel(size_t count, absl::FunctionRef<void(size_t)> run) {
  constexpr size_t kMost = 16;
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t i = next++; i < count; i = next++) run(i);
  };
  std::vector<std::thread> helpers;
  const size_t threads = std::min<size_t>({count, std::thread::hardware_concurrency(), kMost});
  try {
    for (size_t i = 1; i < threads; ++i) helpers.emplace_back(work);
  } catch (const std::system_error&) {  // the process may have no more threads: those that there are do it
  }
  work();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace shardd
