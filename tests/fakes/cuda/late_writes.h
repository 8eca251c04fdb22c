#ifndef SHARDD_TESTS_FAKES_CUDA_LATE_WRITES_H_
#define SHARDD_TESTS_FAKES_CUDA_LATE_WRITES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace shardd::fake_cuda {

// Values that streams write to words, some time after the stream came to them, by somebody who does not die with this
// process: what a GPU has fetched from a queue lands, also when its owner has been killed in between.
//
// It is a process that shares this one's memory, all of it, and nothing else: no descriptors, no signals, no terminal.
// So nothing has to be mapped twice, and it works for memory that children of fork do not inherit. It ends when this
// process has, after the last write. While it lives, so does this process' memory.
//
// Thread-safe. There is one value per stream at most on its way: the next item of a stream waits until it has landed.
class LateWrites {
 public:
  struct Options {
    uint64_t delay_us = 0;
    // Nothing lands while there is such a file; empty: nothing is held. FILE.held tells that a value is on its way, and
    // lands whatever becomes of its process.
    std::string hold_file;
    bool any() const { return delay_us != 0 || !hold_file.empty(); }
  };
  // nullptr where the process cannot be made, or the name is too long.
  static std::unique_ptr<LateWrites> Start(const Options& options);
  LateWrites(const LateWrites&) = delete;
  LateWrites& operator=(const LateWrites&) = delete;
  ~LateWrites();  // when all have landed

  // *word = value, later; it stays mapped until then. The number is for Landed. Blocks while very many are on their
  // way.
  uint64_t Hand(uint64_t* word, uint64_t value);
  bool Landed(uint64_t number) const;

 private:
  struct Shared;

  explicit LateWrites(uint64_t delay_us) : delay_ns_(delay_us * 1000) {}
  static int Run(void* shared);

  const uint64_t delay_ns_;
  std::mutex mutex_;  // of who hands
  Shared* shared_ = nullptr;
};

}  // namespace shardd::fake_cuda

#endif  // SHARDD_TESTS_FAKES_CUDA_LATE_WRITES_H_
