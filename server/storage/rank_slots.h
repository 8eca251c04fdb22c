#ifndef SHARDD_SERVER_STORAGE_RANK_SLOTS_H_
#define SHARDD_SERVER_STORAGE_RANK_SLOTS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/shm/slab.h"
#include "common/shm/unique_fd.h"

namespace shardd {

// The gradient slots of a job's ranks in memory of the host. A process has the same ones in each of its sessions, also
// at the daemon that takes the job up: pages that are made anew are most of what attaching again takes. Another process
// gets others, because the one before may still write its own.
//
// Owns the slabs. The take-up log says whose each is for the next daemon: it has new ones too early for the process
// before at worst, which nobody else has mapped. Thread-safe; one call of For at a time.
class RankSlots {
 public:
  // A process, whatever its number has become since. `start_ticks` 0: not known, and never the same as another.
  struct Process {
    int32_t pid = 0;
    uint64_t start_ticks = 0;
  };
  // `size_bytes` of each rank.
  RankSlots(int world_size, int64_t size_bytes) : size_bytes_(size_bytes), by_rank_(static_cast<size_t>(world_size)) {}
  // A client that keeps its mapping keeps no memory, unless another daemon takes the job up.
  ~RankSlots();

  // The rank's slots for a session of `process`: what it had, or new ones, of zeros. Those of another process go first.
  // Blocks, about 1 s per GiB. RESOURCE_EXHAUSTED: no memory.
  absl::StatusOr<std::shared_ptr<Slab>> For(int rank, const Process& process) ABSL_LOCKS_EXCLUDED(mutex_);
  // The rank is a process that has its slots elsewhere.
  void Drop(int rank) ABSL_LOCKS_EXCLUDED(mutex_);
  // Frees the slots of processes that have ended, or are not known, but for those that a session holds. Blocks.
  void FreeOfEnded() ABSL_LOCKS_EXCLUDED(mutex_);
  // Of all ranks, also between their sessions.
  int64_t allocated_bytes() const ABSL_LOCKS_EXCLUDED(mutex_);

  // As JobMemory::KeepBy, which calls it.
  using HandOver = std::function<absl::Status(const std::string& name, int fd)>;
  absl::Status KeepBy(HandOver hand_over) ABSL_LOCKS_EXCLUDED(mutex_);
  // No daemon takes the job up.
  void EndCustody() ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes out of `kept` what another daemon has left of all this. What is not whole is let go, and whose the rest is
  // says SetProcess.
  // What is taken up is added to `taken_up`, and outlives this call.
  void TakeUp(std::map<std::string, UniqueFd>& kept, std::vector<const Slab*>* taken_up) ABSL_LOCKS_EXCLUDED(mutex_);
  // The last process that had a session of the rank.
  void SetProcess(int rank, const Process& process) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct OfRank {
    Process process;
    std::shared_ptr<Slab> slab;  // null: none yet
  };

  const int64_t size_bytes_;
  mutable absl::Mutex mutex_;
  std::vector<OfRank> by_rank_ ABSL_GUARDED_BY(mutex_);
  HandOver hand_over_ ABSL_GUARDED_BY(mutex_);  // null: nothing outlives the daemon
};

}  // namespace shardd

#endif  // SHARDD_SERVER_STORAGE_RANK_SLOTS_H_
