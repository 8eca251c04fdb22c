#ifndef SHARDD_SERVER_JOB_WRITES_VALUE_COPIES_H_
#define SHARDD_SERVER_JOB_WRITES_VALUE_COPIES_H_

// Copies of values between trainers' staging and one job's slabs. A GPU that hangs may keep a copy for seconds, and old
// bytes of a large model take as long to put back, so a thread of their own, the copier, makes them. It serves all
// jobs by turns, a piece at a time.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/clock/monotonic_now.h"
#include "server/turns/work_owner.h"

namespace shardd {

class CoreLoop;
class JobSlab;
class TurnQueue;

// Owns the count of the job's copies and the time of their last progress. Loop-confined.
class ValueCopies {
 public:
  // Makes the copy, or the next piece of it, of a few milliseconds, and then sets *more: it is called again. An error
  // ends it. Runs on the copier, where it may touch nothing of the job but slabs and its UndoSlab.
  using Copy = std::function<absl::Status(bool* more)>;
  using Then = std::function<void(absl::Status)>;

  // Both outlive this. `owner`: whose turns copies take.
  ValueCopies(CoreLoop* loop, TurnQueue* copier, WorkOwner owner) : loop_(loop), copier_(copier), owner_(owner) {}

  // A copy of so few bytes takes less time than waking the copier does, and no other copy can be of the same bytes: the
  // caller makes it on the loop. Models have thousands of small parameters. A device's memory is never written so, for
  // that waits for the device.
  bool IsMadeAtOnce(const JobSlab& slab, int64_t size_bytes) const;
  // Runs `copy` on the copier, behind all copies of the job before it, and then `then` on the loop. `job` keeps the job
  // alive.
  void Run(std::shared_ptr<void> job, Copy copy, Then then);
  // Runs `closure` on the copier, behind all copies of the job that were asked for. It keeps alive what it needs.
  void Behind(absl::AnyInvocable<void()> closure);
  bool idle() const { return under_way_ == 0; }  // nothing of Run is to come
  // A copy of this job's has made no progress for longer than any limit of a copy's own: a driver does not return.
  // False for copies that wait for those of other jobs.
  bool IsStuck(absl::Time now) const;
  static constexpr absl::Duration kLimit = absl::Seconds(60);

 private:
  CoreLoop* const loop_;
  TurnQueue* const copier_;
  const WorkOwner owner_;
  int under_way_ = 0;
  std::atomic<int64_t> progressed_ns_ = 0;  // MonotonicNow() when the piece that runs began; 0: none runs
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_VALUE_COPIES_H_
