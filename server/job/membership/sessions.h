#ifndef SHARDD_SERVER_JOB_MEMBERSHIP_SESSIONS_H_
#define SHARDD_SERVER_JOB_MEMBERSHIP_SESSIONS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "common/shm/unique_fd.h"

namespace shardd {

class CoreLoop;
class Session;

// The sessions of a job's ranks in the current epoch. Owns them and what the loop watches of them. Loop-confined.
class Sessions {
 public:
  Sessions(int world_size, CoreLoop* loop);
  ~Sessions();

  // Null: the rank has none.
  const std::unique_ptr<Session>& operator[](int rank) const { return by_rank_[rank]; }
  auto begin() const { return by_rank_.begin(); }
  auto end() const { return by_rank_.end(); }
  const std::vector<std::unique_ptr<Session>>& by_rank() const { return by_rank_; }
  Session* Find(uint64_t session_id) const;
  int attached() const;

  void SetAwake(bool awake) const;
  // Ranks that have sent nothing for a while hear for whom they wait, as `wait_text` says, so that a client whose own
  // patience ends can say it. A few ranks at a time, in turns.
  void TellWaiting(absl::Time now, absl::FunctionRef<std::string(int rank)> wait_text);
  // Watches the doorbell of a new session. REQUIRES: its rank has none.
  void Add(std::unique_ptr<Session> session);
  // The end of the process becomes the session's: `on_end` runs then, unless the rank has another session. A session
  // that has a process keeps it. `pidfd` may be invalid.
  void WatchProcess(Session* session, UniqueFd pidfd, std::function<void()> on_end);
  // The process has ended: its descriptor stays readable, and is not watched any more.
  void ForgetProcess(const Session& session);
  // Nothing of the session is watched any more, which may then be taken.
  void Unwatch(const Session& session);
  // Posts what waits until the session is not held any more, which finds it so, or gone.
  void PostReleased(Session* session) const;
  std::unique_ptr<Session> Take(int rank);

 private:
  CoreLoop* const loop_;
  std::vector<std::unique_ptr<Session>> by_rank_;
  int next_told_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_MEMBERSHIP_SESSIONS_H_
