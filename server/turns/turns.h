#ifndef SHARDD_SERVER_TURNS_TURNS_H_
#define SHARDD_SERVER_TURNS_TURNS_H_

// Who is next where jobs share something: a device's worker, a GPU's queues, the thread that copies values. Users with
// work share it evenly, and the jobs of one user share what the user gets, so that sixty jobs have one user's share.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "absl/functional/function_ref.h"
#include "server/turns/work_owner.h"

namespace shardd {

// What sharers have used of something, in units of its owner (say, nanoseconds). The next is who has used least. Who is
// idle saves at most `most_saved` of a share: it goes before others for that long. Thread-compatible.
class FairShares {
 public:
  explicit FairShares(int64_t most_saved) : most_saved_(most_saved) {}

  // `id` has work from here on. No effect if it has.
  void Enter(uint64_t id);
  // It has none.
  void Leave(uint64_t id);
  void Charge(uint64_t id, int64_t cost);
  // Of those with work that are `ready`, the one that has used least; none: nobody is. Tell Served who was served.
  std::optional<uint64_t> Next(absl::FunctionRef<bool(uint64_t)> ready) const;
  void Served(uint64_t id);
  bool idle() const { return busy_ == 0; }

 private:
  // Number of idle sharers whose use is remembered. Beyond it all of them are forgotten, as if each had saved the most.
  static constexpr size_t kMostIdle = 64;
  struct Sharer {
    int64_t used = 0;
    bool busy = false;
  };

  const int64_t most_saved_;
  std::map<uint64_t, Sharer> sharers_;
  size_t busy_ = 0;
  int64_t turn_ = 0;  // the largest `used` of a sharer when it was served
};

// Turns go by user, then by the user's jobs. Thread-compatible.
class Turns {
 public:
  // `most_saved`: as of FairShares.
  explicit Turns(int64_t most_saved) : most_saved_(most_saved), users_(most_saved) {}

  void Enter(WorkOwner owner);
  void Leave(WorkOwner owner);
  // REQUIRES: `owner` has entered and not left.
  void Charge(WorkOwner owner, int64_t cost);
  // The next to be served among owners with work that are `ready`; none: nobody is.
  std::optional<WorkOwner> Next(absl::FunctionRef<bool(WorkOwner)> ready);

 private:
  const int64_t most_saved_;
  FairShares users_;
  std::map<uint32_t, FairShares> jobs_;  // by user, of users with work
};

}  // namespace shardd

#endif  // SHARDD_SERVER_TURNS_TURNS_H_
