#ifndef SHARDD_SERVER_SERVICE_FD_REPLY_H_
#define SHARDD_SERVER_SERVICE_FD_REPLY_H_

// Answers of the fd channel, from the request until the client has read them. Sent descriptors that are not read stay
// open in the kernel on the daemon's account, even after the daemon has closed the socket (RLIMIT_NOFILE bounds them
// per user, and the system has one table of files for all). So an answer has a slot until then, in a separate count: a
// client that does not read is refused descriptors, and nobody is refused a connection.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "common/shm/unique_fd.h"

namespace shardd {

// Counts slots of connections, or of answers, by uid. Thread-safe.
class PendingCount {
 public:
  struct Limits {
    size_t per_uid;
    size_t total;
  };
  bool TryAcquire(uint32_t uid, size_t max_per_uid, size_t max_total) ABSL_LOCKS_EXCLUDED(mutex_);
  void Release(uint32_t uid) ABSL_LOCKS_EXCLUDED(mutex_);
  size_t total() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  mutable absl::Mutex mutex_;
  size_t total_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<uint32_t, size_t> of_uid_ ABSL_GUARDED_BY(mutex_);
};

// One slot, released with the object. It shares the count because a reply may outlive the listener.
class PendingSlot {
 public:
  PendingSlot(std::shared_ptr<PendingCount> count, uint32_t uid) : count_(std::move(count)), uid_(uid) {}
  PendingSlot(PendingSlot&&) = default;
  PendingSlot& operator=(PendingSlot&&) = delete;
  ~PendingSlot() {
    if (count_ != nullptr) {
      count_->Release(uid_);
    }
  }
  uint32_t uid() const { return uid_; }

 private:
  std::shared_ptr<PendingCount> count_;
  uint32_t uid_ = 0;
};

// Answers with descriptors that clients have not read. Thread-safe; never blocks.
class UnreadAnswers {
 public:
  // `epoll` (not owned) must be open until Close(). Whoever waits on it must call Advance() with the numbers that it
  // reports.
  UnreadAnswers(int epoll, PendingCount::Limits limits) : epoll_(epoll), limits_(limits) {}

  // A slot for an answer with descriptors; none if the user has too many unread ones.
  std::optional<PendingSlot> Reserve(uint32_t uid);
  size_t count() const { return count_->total(); }
  // Owns socket and slot until the client has read everything or has closed its end. Owns nothing after Close().
  void Add(UniqueFd socket, PendingSlot slot) ABSL_LOCKS_EXCLUDED(mutex_);
  // Releases `socket` if its answer was read; ignores other numbers.
  void Advance(int socket) ABSL_LOCKS_EXCLUDED(mutex_);
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Unread {
    UniqueFd socket;
    PendingSlot slot;
  };
  const int epoll_;
  const PendingCount::Limits limits_;
  const std::shared_ptr<PendingCount> count_ = std::make_shared<PendingCount>();
  absl::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<int, Unread> unread_ ABSL_GUARDED_BY(mutex_);
};

class FdReplyState;

// The answer that a client of the fd channel waits for. A copyable handle: the connection closes with the answer or,
// with UNAVAILABLE, when the last copy goes without one: the daemon ends. Only the first call answers. Thread-safe;
// never blocks.
class FdReply {
 public:
  FdReply(UniqueFd socket, PendingSlot slot, std::shared_ptr<UnreadAnswers> unread);
  // Does not consume `fds`.
  void operator()(const absl::Status& status, const std::vector<int>& fds = {}) const;

 private:
  std::shared_ptr<FdReplyState> state_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_FD_REPLY_H_
