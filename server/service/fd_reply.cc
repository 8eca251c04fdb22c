#include "server/service/fd_reply.h"

#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "common/shm/fd_channel.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

// True if nothing sent is in the client's queue any more: it has read everything, or its last descriptor is closed.
bool WasRead(int socket) {
  int queued_bytes = 0;
  // The kernel counts a message's memory, hundreds of bytes at least. When it reports that the last one is gone it
  // still has a count of one for itself, and does not report again.
  return ::ioctl(socket, SIOCOUTQ, &queued_bytes) != 0 || queued_bytes <= 1;
}

}  // namespace

bool PendingCount::TryAcquire(uint32_t uid, size_t max_per_uid, size_t max_total) {
  absl::MutexLock lock(&mutex_);
  if (total_ >= max_total) {
    return false;
  }
  size_t& of_uid = of_uid_[uid];
  if (of_uid >= max_per_uid) {
    return false;
  }
  ++of_uid;
  ++total_;
  return true;
}

void PendingCount::Release(uint32_t uid) {
  absl::MutexLock lock(&mutex_);
  --total_;
  const auto it = of_uid_.find(uid);
  if (--it->second == 0) {
    of_uid_.erase(it);
  }
}

size_t PendingCount::total() const {
  absl::MutexLock lock(&mutex_);
  return total_;
}

std::optional<PendingSlot> UnreadAnswers::Reserve(uint32_t uid) {
  if (!count_->TryAcquire(uid, limits_.per_uid, limits_.total)) {
    return std::nullopt;
  }
  return PendingSlot(count_, uid);
}

void UnreadAnswers::Add(UniqueFd socket, PendingSlot slot) {
  absl::MutexLock lock(&mutex_);
  if (closed_) {
    return;
  }
  const int fd = socket.get();
  // Edge-triggered: this call is an event, and so is each message that the client takes out of its queue.
  epoll_event event = {};
  event.events = EPOLLOUT | EPOLLET;
  event.data.fd = fd;
  if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) {
    LogError(absl::StrCat("fd channel: ", absl::ErrnoToStatus(errno, "an answer is not watched").message()));
    return;
  }
  unread_.emplace(fd, Unread{std::move(socket), std::move(slot)});
}

void UnreadAnswers::Advance(int socket) {
  absl::MutexLock lock(&mutex_);
  if (const auto it = unread_.find(socket); it != unread_.end() && WasRead(socket)) {
    unread_.erase(it);
  }
}

void UnreadAnswers::Close() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
  unread_.clear();
}

class FdReplyState {
 public:
  FdReplyState(UniqueFd socket, PendingSlot slot, std::shared_ptr<UnreadAnswers> unread)
      : unread_(std::move(unread)), socket_(std::move(socket)), slot_(std::move(slot)) {}
  ~FdReplyState() { Answer(absl::UnavailableError("fetch descriptors: the daemon is shutting down"), {}); }

  void Answer(const absl::Status& status, const std::vector<int>& fds) {
    if (answered_.exchange(true)) {
      return;
    }
    std::optional<PendingSlot> unread = fds.empty() ? std::nullopt : unread_->Reserve(slot_.uid());
    absl::Status sent = fds.empty() || unread.has_value()
                            ? SendFdReply(socket_.get(), status, fds)
                            : absl::ResourceExhaustedError(
                                  absl::StrCat("fetch descriptors: too many answers are not read (uid=", slot_.uid(),
                                               "); read them or close their connections"));
    if (absl::IsResourceExhausted(sent)) {
      unread.reset();
      LogWarning(absl::StrCat("fd channel: ", sent.message()));
      sent = SendFdReply(socket_.get(), sent, {});
    }
    if (!sent.ok()) {
      LogDebug(absl::StrCat("fd channel: ", sent.ToString()));
    }
    // Here, not when the last copy goes: the client reads to the end of the stream.
    ::shutdown(socket_.get(), SHUT_RDWR);
    if (unread.has_value() && !WasRead(socket_.get())) {
      unread_->Add(std::move(socket_), std::move(*unread));
    }
  }

 private:
  const std::shared_ptr<UnreadAnswers> unread_;
  std::atomic<bool> answered_ = false;
  // Set for the one call that answers.
  UniqueFd socket_;
  PendingSlot slot_;
};

FdReply::FdReply(UniqueFd socket, PendingSlot slot, std::shared_ptr<UnreadAnswers> unread)
    : state_(std::make_shared<FdReplyState>(std::move(socket), std::move(slot), std::move(unread))) {}

void FdReply::operator()(const absl::Status& status, const std::vector<int>& fds) const { state_->Answer(status, fds); }

}  // namespace shardd
