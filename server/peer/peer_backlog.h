#ifndef SHARDD_SERVER_PEER_PEER_BACKLOG_H_
#define SHARDD_SERVER_PEER_PEER_BACKLOG_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/peer/peer_links.h"

namespace shardd {

// The messages of one link that the job has not processed yet: owns their count in bytes, and the reader that waits for
// it to fall. Thread-safe. A shared_ptr, because receipts may outlive the link.
class PeerBacklog : public std::enable_shared_from_this<PeerBacklog> {
 public:
  explicit PeerBacklog(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Counts a message of `size_bytes`, with its overhead, until the receipt is dropped.
  PeerReceipt Add(int64_t size_bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs `read` now if less than the limit is pending, otherwise on the thread that drops the receipt which makes room.
  // REQUIRES: no other `read` waits.
  void WhenRoom(std::function<void()> read) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Remove(int64_t size_bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  const int64_t limit_bytes_;
  absl::Mutex mutex_;
  int64_t pending_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::function<void()> waiting_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_PEER_BACKLOG_H_
