#ifndef SHARDD_SERVER_JOB_WRITES_FORMER_WRITERS_H_
#define SHARDD_SERVER_JOB_WRITES_FORMER_WRITERS_H_

// Processes of an epoch that has ended that may still store into the shards.
//
// Ranks that live on go on storing until a call tells them that the epoch is over, and their GPUs with what they were
// given: those that hand in, and with pass_copies all. So nothing is copied back before each of them has asked
// to attach again, which a client does behind all that its stream has and when no store of its process reaches the
// shards any more, or its process has ended.

#include <cstdint>
#include <list>
#include <string>

#include "absl/time/time.h"
#include "common/shm/unique_fd.h"

namespace shardd {

// Owns descriptors of the processes. Loop-confined.
class FormerWriters {
 public:
  // A process that has several ranks may attach them one after the other: so long after Begin the first one speaks for
  // all of them.
  static constexpr absl::Duration kMostWaitForOwnRanks = absl::Seconds(5);

  // `uid`: the trainers'. No process of another one is killed.
  explicit FormerWriters(uint32_t uid) : uid_(uid) {}

  // The epoch has ended. Waits from here on, until StopWaiting.
  void Begin(absl::Time now);
  // The process, which may have ended already. `process` may be invalid.
  void Add(int rank, int32_t pid, UniqueFd process);
  bool waiting() const { return waiting_; }
  void StopWaiting() { waiting_ = false; }
  // Nobody can store any more.
  bool none() const { return writers_.empty(); }
  // "rank 0 (pid 17), rank 1 (pid 18)"
  std::string Names() const;

  // The rank asks to attach, from process `pid` (0: of another PID namespace) with the pidfd `process`: what its
  // process had enqueued before has run. Forgets the processes that can store no more; where two of a rank cannot be
  // told apart (CanBeTold), it is the same that comes back. `replace`: kills the rank's former process; returns why it
  // could not be, or "". `on_devices`: shards lie on devices, where an attach speaks for the rank's own stream alone.
  std::string Attaching(int rank, int32_t pid, const UniqueFd& process, bool replace, bool on_devices, absl::Time now);

 private:
  struct Writer {
    int rank = 0;
    int32_t pid = 0;
    UniqueFd process;
    // It has been answered since: what it asks next it asks knowing that the epoch is over.
    bool told = false;
  };
  const uint32_t uid_;
  std::list<Writer> writers_;
  absl::Time since_ = absl::InfinitePast();
  bool waiting_ = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_FORMER_WRITERS_H_
