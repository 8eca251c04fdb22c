#ifndef SHARDD_COMMON_TENSOR_UPDATE_LOG_H_
#define SHARDD_COMMON_TENSOR_UPDATE_LOG_H_

// Old values of the few elements that an update is about to change, in memory that outlives the daemon, so that an
// update whose process was killed can be completed by another one.
//
// The elements that one rank's operations update are numbered in the order of operations, which is the same whenever
// the operations are made of the same plan and step. They are updated in this order, a block at a time:
//
//   Save (the block's old values), Begun --> the update, in place --> Done
//
// Blocks are so small that a core has the memory of the next ones on its way while it works on one: a kernel keeps them
// itself (update.cc). On a GPU the blocks are pieces of millions of elements, whose old values lie in memory of that
// GPU (Logged in server/device/device.h), and its stream stores the words.
//
// A killed process leaves what its threads had stored up to some instruction, in the order of the program. So where
// `begun` is `done` the block from there on may be torn, and its old values are here; everything before it is done, and
// nothing after it is begun.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace shardd {

// Where several threads update parts of one rank's elements, each part has a log of its own, and the first one says how
// many parts there are. Elements keep their numbers.
//
// A member of shared memory, which starts as zeros. Written by the thread that updates the elements.
class UpdateLog {
 public:
  static constexpr int64_t kBlockNumel = 128;
  static constexpr int kArrays = 4;  // parameter, and three states
  static constexpr int64_t kMaxElementBytes = 4;

  // What a log takes that keeps so many arrays, at least 3: what Save was given is all that is read or written.
  static constexpr int64_t SizeBytes(int arrays) {
    return static_cast<int64_t>(sizeof(UpdateLog)) - (kArrays - arrays) * kBlockNumel * kMaxElementBytes;
  }

  // The update of the step begins, of elements from `first` on.
  void Begin(int64_t step, int64_t first = 0, int64_t parts = 1) {
    step_.store(0, std::memory_order_seq_cst);
    begun_.store(-1, std::memory_order_seq_cst);
    done_.store(first, std::memory_order_seq_cst);
    parts_.store(parts, std::memory_order_seq_cst);
    step_.store(step, std::memory_order_seq_cst);
  }
  // Of a block that is about to change: what array 0, 1, 2 or 3 has there. Then, which elements it has.
  void Save(int array, const void* values, int64_t size_bytes) {
    typedef uint32_t Word __attribute__((aligned(1), may_alias));
    const char* const from = static_cast<const char*>(values);
    char* const to = old_[array];
    int64_t i = 0;
    for (; i + int64_t{sizeof(Word)} <= size_bytes; i += int64_t{sizeof(Word)}) {  // vectors (isa_internal.h)
      *reinterpret_cast<Word*>(to + i) = *reinterpret_cast<const Word*>(from + i);
    }
    for (; i < size_bytes; ++i) to[i] = from[i];
  }
  void Begun(int64_t first, int64_t count) {
    count_.store(count, std::memory_order_relaxed);
    begun_.store(first, std::memory_order_release);
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  void Done(int64_t end) {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    done_.store(end, std::memory_order_release);
  }

  // Where the stream of a GPU stores what Begun and Done do, `count` before `begun`.
  struct Words {
    void* count;
    void* begun;
    void* done;
  };
  Words words() { return {&count_, &begun_, &done_}; }
  // Remembers a number that what is left of an update needs, and that cannot be computed again from where it begins to
  // change what it was computed of.
  void Remember(double number) {
    uint64_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    remembered_.store(bits, std::memory_order_release);
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  double remembered() const {
    const uint64_t bits = remembered_.load();
    double number;
    std::memcpy(&number, &bits, sizeof(number));
    return number;
  }
  // What was torn is whole again: its old values are needed no more.
  void NotTorn() { begun_.store(-1, std::memory_order_seq_cst); }

  bool is_of(int64_t step) const { return step_.load() == step; }
  int64_t parts() const { return parts_.load(); }
  int64_t block_numel() const { return count_.load(); }  // of the block that is_torn means
  // A part of an array; null: there is no such array.
  struct Array {
    void* data = nullptr;
    int64_t size_bytes = 0;
  };
  // Of a process that has ended: how many elements of the step are done. Puts back the old values of a block that is
  // not.
  int64_t done(int64_t step) const { return step_.load() == step ? std::max<int64_t>(0, done_.load()) : 0; }
  bool is_torn(int64_t step) const { return step_.load() == step && begun_.load() == done_.load(); }
  void PutBack(const Array (&arrays)[kArrays]) const {
    for (int i = 0; i < kArrays; ++i) {
      if (arrays[i].data != nullptr) std::memcpy(arrays[i].data, old_[i], static_cast<size_t>(arrays[i].size_bytes));
    }
  }

 private:
  std::atomic<int64_t> step_;
  std::atomic<int64_t> begun_;
  std::atomic<int64_t> done_;
  std::atomic<int64_t> count_;
  std::atomic<int64_t> parts_;
  std::atomic<uint64_t> remembered_;  // unused before there was Adafactor
  [[maybe_unused]] int64_t unused_[2];
  char old_[kArrays][kBlockNumel * kMaxElementBytes];
};
static_assert(std::atomic<int64_t>::is_always_lock_free && sizeof(UpdateLog) == 64 + 4 * 512);

}  // namespace shardd

#endif  // SHARDD_COMMON_TENSOR_UPDATE_LOG_H_
