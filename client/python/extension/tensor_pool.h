#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_TENSOR_POOL_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_TENSOR_POOL_H_

// Memory of this process' large CPU tensors, activations above all, that goes back to the system as they are freed.
// malloc keeps what backward frees (glibc: in the middle of its heap, for ever), and has it in small pages, of which
// 1 GiB costs about half a second of faults each time it comes back. Here it lies in huge pages, a fifth of that, so a
// page that nothing lies in may go at once, but for some that are kept for what comes next.

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace shardd::python {

// Ranges of one reservation of addresses, best fit, neighbours joined. Thread-safe.
class TensorPool {
 public:
  static constexpr size_t kPageBytes = size_t{2} << 20;      // a huge page: what is given back at a time
  static constexpr size_t kMinBlockBytes = size_t{1} << 17;  // smaller tensors are malloc's
  // Null where the system gives no huge pages, or not so many addresses. Nothing is ever given back but pages.
  static TensorPool* Create(size_t reserved_bytes);

  bool Owns(const void* data) const { return data >= base_ && data < base_ + reserved_bytes_; }
  // `size_bytes` bytes, aligned to a cache line; null: none are left.
  void* Allocate(size_t size_bytes);
  // REQUIRES: from Allocate.
  void Free(void* data);

  struct Facts {
    size_t used_bytes = 0;      // of tensors
    size_t resident_bytes = 0;  // of pages that were touched and not given back
    uint64_t pages_given_back = 0;
  };
  Facts facts() const;

  // Around fork().
  void Lock() { mutex_.lock(); }
  void Unlock() { mutex_.unlock(); }

 private:
  struct Block {
    size_t size_bytes;
    bool used;
  };
  using Blocks = std::map<char*, Block>;  // by address: they cover the reservation
  TensorPool(char* base, size_t reserved_bytes);
  void AddFree(Blocks::iterator block);
  void RemoveFree(Blocks::iterator block);
  // The block is used by one more, or one less, of each page that it lies in.
  void Touch(const char* data, size_t size_bytes, int change);
  void GiveBack();

  char* const base_;
  const size_t reserved_bytes_;
  mutable std::mutex mutex_;
  Blocks blocks_;
  std::set<std::pair<size_t, char*>> free_;  // by size, then address: low ones first, so that high pages become idle
  struct Page {
    uint32_t users = 0;
    bool resident = false;
  };
  std::vector<Page> pages_;
  std::set<size_t> idle_;  // resident, and nothing lies in them
  Facts facts_;
};

// From now on large CPU tensors of this process lie in a pool; those that there are stay where they are. Once; false:
// they lie in malloc's memory, because the system gives no huge pages, or not enough addresses.
bool UseTensorPool();
// All zero without one.
TensorPool::Facts TensorPoolFacts();

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_TENSOR_POOL_H_
