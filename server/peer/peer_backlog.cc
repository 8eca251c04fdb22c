#include "server/peer/peer_backlog.h"

#include <utility>

namespace shardd {
namespace {

// Overhead of a decoded and queued message; measured in hundreds of bytes.
constexpr int64_t kMessageBytes = 512;

}  // namespace

PeerReceipt PeerBacklog::Add(int64_t size_bytes) {
  size_bytes += kMessageBytes;
  {
    absl::MutexLock lock(&mutex_);
    pending_bytes_ += size_bytes;
  }
  return PeerReceipt(nullptr, [self = shared_from_this(), size_bytes](const void*) { self->Remove(size_bytes); });
}

void PeerBacklog::WhenRoom(std::function<void()> read) {
  {
    absl::MutexLock lock(&mutex_);
    if (pending_bytes_ >= limit_bytes_) {
      waiting_ = std::move(read);
      return;
    }
  }
  read();
}

void PeerBacklog::Remove(int64_t size_bytes) {
  std::function<void()> read;
  {
    absl::MutexLock lock(&mutex_);
    pending_bytes_ -= size_bytes;
    if (pending_bytes_ < limit_bytes_) {
      std::swap(read, waiting_);
    }
  }
  if (read != nullptr) {
    read();
  }
}

}  // namespace shardd
