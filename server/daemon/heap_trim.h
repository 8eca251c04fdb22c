#ifndef SHARDD_SERVER_DAEMON_HEAP_TRIM_H_
#define SHARDD_SERVER_DAEMON_HEAP_TRIM_H_

#include <atomic>
#include <cstddef>
#include <functional>

namespace shardd {

// When free memory of the heap goes back to the system. malloc_trim holds the lock of a whole arena while it does (0.7
// s for each GiB), and stops every thread that allocates there, so it runs while no rank is attached, whose steps could
// wait for it. Beyond kMostKeptBytes it runs all the same.
//
// Owns whether that is due. Thread-safe.
class HeapTrim {
 public:
  static constexpr size_t kMostKeptBytes = size_t{512} << 20;

  HeapTrim();
  // For tests: `free_bytes` that the heap keeps, and what gives them back.
  HeapTrim(std::function<size_t()> free_bytes, std::function<void()> trim);

  // A job is freed. May block for as long as a trim takes: not on the loop.
  void Freed();
  // Returns true once for each Freed, when nobody is disturbed: the caller has Run called on a thread that may block.
  bool TakeDue(bool quiet) { return quiet && due_.exchange(false); }
  void Run() { trim_(); }

 private:
  const std::function<size_t()> free_bytes_;
  const std::function<void()> trim_;
  std::atomic<bool> due_ = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_HEAP_TRIM_H_
