#ifndef SHARDD_SERVER_JOB_MEMBERSHIP_TRAINER_SUMS_H_
#define SHARDD_SERVER_JOB_MEMBERSHIP_TRAINER_SUMS_H_

// What trainers add (JobConfig.trainer_sums): sessions and the collective that tells them, and what becomes of sums
// that are under way when a session ends.
//
// A sum that a rank's GPU has in its queue may be made after the epoch has ended, whoever was killed. It writes that
// rank's part of the gradient shards and nothing else, and nobody but a session of that rank, or its device while it
// has none, writes or zeroes that part in a later epoch before the rank's next session is there. So that one is not
// given before the last one is known to write no more: its sums are there, its library has said so, or its process has
// ended, and with it its contexts. What the part holds then does not matter: nothing in it is present in a new epoch,
// so the first sum overwrites it.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/shm/fd_channel.h"
#include "common/shm/unique_fd.h"
#include "server/collective/trainers/trainer_collective.h"
#include "server/job/job_part.h"
#include "server/job/membership/attach_answer.h"

namespace shardd {

class Session;
class SumChannel;

// Tells the collective which session adds a rank's part. Owns what has to be known of ended sessions whose sums are
// under way. Where devices add (by_trainers() false) there are none. Loop-confined.
class TrainerSums final : public JobPart {
 public:
  // A session that has ended with sums under way, which its process's GPU may still make.
  struct Straggler {
    int rank = 0;
    PeerCredentials peer;
    UniqueFd pidfd;
    std::shared_ptr<SumChannel> sums;
  };

  // `collective` outlives every call.
  explicit TrainerSums(Collective* collective) : collective_(collective), trainers_(collective->trainers()) {}

  bool by_trainers() const { return trainers_ != nullptr; }
  // Sums are under way: Poll finds out whether they are there.
  bool waiting() const { return trainers_ != nullptr && trainers_->waiting(); }
  bool Poll() { return trainers_->Poll(); }

  void SessionBegins(const Session& session);
  // Takes the session's pidfd where its sums are under way.
  void SessionEnds(Session* session) override;
  // Stragglers of whom nothing is under way any more; they hold memory of sessions. A process that has ended has no
  // contexts, so nothing of it is in a GPU's queue.
  std::vector<Straggler> TakeDone();
  std::vector<Straggler> TakeAll() { return std::exchange(stragglers_, {}); }
  // Whether a straggler of the rank keeps it from attaching. `what` begins the text. With `replace` a process other
  // than `pid` is killed; where that cannot be, nothing may ever tell that its sums were made, and new shards are
  // needed.
  AttachAnswer MayAttach(const std::string& what, int rank, int32_t pid, bool replace) const;

  // The rank that has been waited for longest, if for `limit` or more.
  TrainerCollective::Late FindLate(absl::Time now, absl::Duration limit) const;

 private:
  Collective* const collective_;
  TrainerCollective* const trainers_;  // it, or null
  std::vector<Straggler> stragglers_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_MEMBERSHIP_TRAINER_SUMS_H_
