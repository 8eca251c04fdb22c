#include "client/python/extension/tensor_pool.h"

#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>

namespace shardd::python {
namespace {

constexpr size_t kGranuleBytes = 4096;
// Idle pages that are kept: what a layer's backward takes and frees again and again, and for programs that hold much
// a part of that. More than twice this is cut down to this.
constexpr size_t kKeptPages = 4;
constexpr size_t kKeptShare = 16;

size_t RoundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

bool SystemGivesHugePages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string text;
  std::getline(file, text);
  return text.find("[madvise]") != std::string::npos || text.find("[always]") != std::string::npos;
}

// Where addresses count as memory, so many of them would take it from others: strict overcommit, limits of the process,
// memory that is locked as it is mapped.
bool AddressesAreFree() {
  std::ifstream overcommit("/proc/sys/vm/overcommit_memory");
  int mode = 0;
  if (overcommit >> mode && mode == 2) {
    return false;
  }
  for (const auto resource : {RLIMIT_AS, RLIMIT_DATA}) {
    rlimit limit{};
    if (getrlimit(resource, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY) {
      return false;
    }
  }
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmLck:", 0) == 0) {
      return line.find_first_of("123456789") == std::string::npos;
    }
  }
  return true;
}

}  // namespace

TensorPool* TensorPool::Create(size_t reserved_bytes) {
  if (!SystemGivesHugePages() || !AddressesAreFree()) {
    return nullptr;
  }
  reserved_bytes = RoundUp(reserved_bytes, kPageBytes);
  // Addresses alone: nothing is counted before it is touched.
  void* const mapped = mmap(nullptr, reserved_bytes + kPageBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    return nullptr;
  }
  char* const base = reinterpret_cast<char*>(RoundUp(reinterpret_cast<size_t>(mapped), kPageBytes));
  if (madvise(base, reserved_bytes, MADV_HUGEPAGE) != 0) {
    munmap(mapped, reserved_bytes + kPageBytes);
    return nullptr;
  }
  return new TensorPool(base, reserved_bytes);
}

TensorPool::TensorPool(char* base, size_t reserved_bytes)
    : base_(base), reserved_bytes_(reserved_bytes), pages_(reserved_bytes / kPageBytes) {
  AddFree(blocks_.emplace(base_, Block{reserved_bytes_, false}).first);
}

void TensorPool::AddFree(Blocks::iterator block) { free_.emplace(block->second.size_bytes, block->first); }

void TensorPool::RemoveFree(Blocks::iterator block) { free_.erase({block->second.size_bytes, block->first}); }

void* TensorPool::Allocate(size_t size_bytes) {
  if (size_bytes > reserved_bytes_) {
    return nullptr;
  }
  size_bytes = RoundUp(size_bytes, kGranuleBytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto fit = free_.lower_bound({size_bytes, nullptr});
  if (fit == free_.end()) {
    return nullptr;
  }
  char* const data = fit->second;
  const auto block = blocks_.find(data);
  free_.erase(fit);
  if (const size_t rest = block->second.size_bytes - size_bytes; rest > 0) {
    block->second.size_bytes = size_bytes;
    AddFree(blocks_.emplace_hint(std::next(block), data + size_bytes, Block{rest, false}));
  }
  block->second.used = true;
  facts_.used_bytes += size_bytes;
  Touch(data, size_bytes, 1);
  return data;
}

void TensorPool::Free(void* data) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto block = blocks_.find(static_cast<char*>(data));
  const size_t size_bytes = block->second.size_bytes;
  facts_.used_bytes -= size_bytes;
  block->second.used = false;
  Touch(block->first, size_bytes, -1);
  if (const auto next = std::next(block); next != blocks_.end() && !next->second.used) {
    RemoveFree(next);
    block->second.size_bytes += next->second.size_bytes;
    blocks_.erase(next);
  }
  if (block != blocks_.begin()) {
    if (const auto before = std::prev(block); !before->second.used) {
      RemoveFree(before);
      before->second.size_bytes += block->second.size_bytes;
      blocks_.erase(block);
      block = before;
    }
  }
  AddFree(block);
  GiveBack();
}

void TensorPool::Touch(const char* data, size_t size_bytes, int change) {
  const size_t first = static_cast<size_t>(data - base_) / kPageBytes;
  const size_t last = static_cast<size_t>(data - base_ + size_bytes - 1) / kPageBytes;
  for (size_t p = first; p <= last; ++p) {
    Page& page = pages_[p];
    if (change > 0 && page.users++ == 0) {
      idle_.erase(p);
      facts_.resident_bytes += page.resident ? 0 : kPageBytes;
      page.resident = true;
    } else if (change < 0 && --page.users == 0) {
      idle_.insert(p);
    }
  }
}

void TensorPool::GiveBack() {
  const size_t kept = std::max(kKeptPages, facts_.used_bytes / kPageBytes / kKeptShare);
  if (idle_.size() <= 2 * kept) {
    return;
  }
  while (idle_.size() > kept) {  // from above, neighbours in one call
    const size_t last = *idle_.rbegin();
    size_t first = last;
    idle_.erase(last);
    while (idle_.size() > kept && !idle_.empty() && *idle_.rbegin() + 1 == first) {
      idle_.erase(--first);
    }
    const size_t size_bytes = (last - first + 1) * kPageBytes;
    (void)madvise(base_ + first * kPageBytes, size_bytes, MADV_DONTNEED);
    for (size_t p = first; p <= last; ++p) {
      pages_[p].resident = false;
    }
    facts_.resident_bytes -= size_bytes;
    facts_.pages_given_back += last - first + 1;
  }
}

TensorPool::Facts TensorPool::facts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return facts_;
}

namespace {

// Both never freed: tensors may outlive everything.
TensorPool* pool = nullptr;
c10::Allocator* small = nullptr;  // what was the allocator before

void Delete(void* data) {
  if (pool->Owns(data)) {
    c10::profiledCPUMemoryReporter().Delete(data);
    pool->Free(data);
  } else {
    small->raw_deallocate(data);
  }
}

class PoolAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size_bytes) override {
    void* data = size_bytes < TensorPool::kMinBlockBytes ? nullptr : pool->Allocate(size_bytes);
    if (data != nullptr) {
      c10::profiledCPUMemoryReporter().New(data, size_bytes);
    } else {
      data = small->raw_allocate(size_bytes);
    }
    return {data, data, &Delete, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Delete; }
  void copy_data(void* to, const void* from, std::size_t size_bytes) const override { memcpy(to, from, size_bytes); }
};

}  // namespace

bool UseTensorPool() {
  if (pool != nullptr) {
    return true;
  }
  // Another one's allocator is left alone: it has its own ways.
  c10::Allocator* const current = c10::GetCPUAllocator();
  if (current != c10::GetDefaultCPUAllocator() || current->raw_deleter() == nullptr) {
    return false;
  }
  const auto memory_bytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  TensorPool* const created = TensorPool::Create(memory_bytes);
  if (created == nullptr) {
    return false;
  }
  small = current;
  pool = created;
  pthread_atfork([] { pool->Lock(); }, [] { pool->Unlock(); }, [] { pool->Unlock(); });
  c10::SetCPUAllocator(new PoolAllocator());
  return true;
}

TensorPool::Facts TensorPoolFacts() { return pool == nullptr ? TensorPool::Facts() : pool->facts(); }

}  // namespace shardd::python
