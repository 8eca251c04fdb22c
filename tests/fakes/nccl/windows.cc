#include "tests/fakes/nccl/windows.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace shardd::nccl {

void Windows::Register(int rank, void* buffer, size_t size_bytes, int flags, ncclWindow_t* out) {
  std::list<Entry>& mine = registrations_[static_cast<size_t>(rank)];
  Entry entry;
  entry.buffer = static_cast<char*>(buffer);
  entry.size_bytes = size_bytes;
  entry.out = out;
  entry.number = mine.size();
  mine.push_back(entry);
  const std::string what = "rank " + std::to_string(rank) + ", window " + std::to_string(entry.number);
  if (reinterpret_cast<uintptr_t>(buffer) % NCCL_WIN_REQUIRED_ALIGNMENT != 0) {
    why_ = "Window address must be suitably aligned : " + what;
  } else if (flags != NCCL_WIN_COLL_SYMMETRIC) {
    why_ = "flags of another kind : " + what;
  } else {
    for (const Entry& other : mine) {
      if (other.number != entry.number && !other.is_gone && other.buffer < entry.buffer + size_bytes &&
          entry.buffer < other.buffer + other.size_bytes) {
        why_ = "registered twice : " + what;
      }
    }
  }
  Match();
}

void Windows::Match() {
  const auto all_have_it = [this] {
    return std::all_of(registrations_.begin(), registrations_.end(),
                       [this](const std::list<Entry>& of_rank) { return of_rank.size() > matched_; });
  };
  while (why_.empty() && all_have_it()) {
    const Entry& first = *std::next(registrations_[0].begin(), static_cast<std::ptrdiff_t>(matched_));
    for (std::list<Entry>& of_rank : registrations_) {
      Entry& entry = *std::next(of_rank.begin(), static_cast<std::ptrdiff_t>(matched_));
      if (entry.size_bytes != first.size_bytes) {
        why_ = "window " + std::to_string(matched_) + " is of " + std::to_string(first.size_bytes) + " bytes and of " +
               std::to_string(entry.size_bytes);
        return;
      }
      entry.is_window = true;
      *entry.out = reinterpret_cast<ncclWindow_t>(&entry);
    }
    ++matched_;
  }
}

ncclResult_t Windows::State(int rank) const {
  if (!why_.empty()) return ncclInvalidArgument;
  return registrations_[static_cast<size_t>(rank)].size() > matched_ ? ncclInProgress : ncclSuccess;
}

ncclResult_t Windows::Deregister(int rank, ncclWindow_t window) {
  for (Entry& entry : registrations_[static_cast<size_t>(rank)]) {
    if (reinterpret_cast<ncclWindow_t>(&entry) != window || !entry.is_window) continue;
    if (entry.uses > 0) return ncclInvalidUsage;
    entry.is_window = false;
    entry.is_gone = true;
    return ncclSuccess;
  }
  return ncclInvalidArgument;
}

const Windows::Entry* Windows::Find(int rank, const void* p) const {
  for (const Entry& entry : registrations_[static_cast<size_t>(rank)]) {
    if (entry.is_window && p >= entry.buffer && p < entry.buffer + entry.size_bytes) return &entry;
  }
  return nullptr;
}

bool Windows::Fits(const std::vector<const void*>& buffers, size_t size_bytes) const {
  const Entry* const first = Find(0, buffers[0]);
  for (size_t rank = 0; rank < buffers.size(); ++rank) {
    const Entry* const entry = Find(static_cast<int>(rank), buffers[rank]);
    if ((entry == nullptr) != (first == nullptr)) return false;
    if (entry == nullptr) continue;
    const char* const begin = static_cast<const char*>(buffers[rank]);
    if (entry->number != first->number ||
        begin - entry->buffer != static_cast<const char*>(buffers[0]) - first->buffer ||
        size_bytes > static_cast<size_t>(entry->buffer + entry->size_bytes - begin)) {
      return false;
    }
  }
  return true;
}

void Windows::Use(int rank, const void* buffer, int change) {
  if (const Entry* const entry = Find(rank, buffer); entry != nullptr) const_cast<Entry*>(entry)->uses += change;
}

}  // namespace shardd::nccl
