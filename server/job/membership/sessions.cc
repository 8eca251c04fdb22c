#include "server/job/membership/sessions.h"

#include <algorithm>
#include <utility>

#include "server/loop/core_loop.h"
#include "server/session/session.h"
#include "server/session/session_stream.h"

namespace shardd {
namespace {

constexpr absl::Duration kTellWaitingAfter = absl::Milliseconds(500);
constexpr int kMostToldAtOnce = 16;  // for each, all ranks are looked at

}  // namespace

Sessions::Sessions(int world_size, CoreLoop* loop) : loop_(loop), by_rank_(world_size) {}

Sessions::~Sessions() = default;

std::unique_ptr<Session> Sessions::Take(int rank) { return std::move(by_rank_[rank]); }

Session* Sessions::Find(uint64_t session_id) const {
  const auto found = std::find_if(by_rank_.begin(), by_rank_.end(), [session_id](const auto& session) {
    return session != nullptr && session->id() == session_id;
  });
  return found == by_rank_.end() ? nullptr : found->get();
}

int Sessions::attached() const {
  return static_cast<int>(std::count_if(by_rank_.begin(), by_rank_.end(), [](const auto& s) { return s != nullptr; }));
}

void Sessions::SetAwake(bool awake) const {
  for (const auto& session : by_rank_) {
    if (session != nullptr) {
      session->words().SetAwake(awake);
    }
  }
}

void Sessions::Add(std::unique_ptr<Session> session) {
  // Never read: the client shares the descriptor and could make a read block. The ring is looked at before the loop
  // sleeps.
  loop_->AddFd(
      session->doorbell(), [] {}, /*edge=*/true);
  const int rank = session->rank();
  by_rank_[rank] = std::move(session);
}

void Sessions::WatchProcess(Session* session, UniqueFd pidfd, std::function<void()> on_end) {
  if (session->pidfd.valid() || !pidfd.valid()) {
    return;
  }
  session->pidfd = std::move(pidfd);
  // Readable once the process has ended, also before its hello and while forked children hold its sockets open.
  loop_->AddFd(session->pidfd.get(),
               [this, rank = session->rank(), session_id = session->id(), on_end = std::move(on_end)] {
                 if (by_rank_[rank] != nullptr && by_rank_[rank]->id() == session_id) {
                   on_end();
                 }
               });
}

void Sessions::ForgetProcess(const Session& session) {
  if (session.pidfd.valid()) {
    loop_->RemoveFd(session.pidfd.get());
  }
}

void Sessions::Unwatch(const Session& session) {
  loop_->RemoveFd(session.doorbell());
  ForgetProcess(session);
}

void Sessions::PostReleased(Session* session) const {
  for (auto& closure : std::exchange(session->when_released, {})) {
    loop_->Post(std::move(closure));
  }
}

void Sessions::TellWaiting(absl::Time now, absl::FunctionRef<std::string(int rank)> wait_text) {
  const int ranks = static_cast<int>(by_rank_.size());
  for (int looked_at = 0, asked = 0; looked_at < ranks && asked < kMostToldAtOnce; ++looked_at) {
    Session* const session = by_rank_[next_told_].get();
    next_told_ = (next_told_ + 1) % ranks;
    if (session == nullptr || session->stream == nullptr || now - session->last_command_time < kTellWaitingAfter) {
      continue;
    }
    ++asked;
    std::string waits = wait_text(session->rank());
    if (waits != session->told_waiting_for) {
      v1::SessionEvent event;
      event.mutable_waiting()->set_for_what(waits);
      session->stream->Send(std::move(event));
      session->told_waiting_for = std::move(waits);
    }
  }
}

}  // namespace shardd
