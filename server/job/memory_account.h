#ifndef SHARDD_SERVER_JOB_MEMORY_ACCOUNT_H_
#define SHARDD_SERVER_JOB_MEMORY_ACCOUNT_H_

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "server/observe/duration_histogram.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

class FullParams;
class GradientWriters;
class JobMemory;
class Sessions;
class Snapshot;

// One job's memory by purpose, as it is and as it was promised. Reads facts and changes nothing. Loop-confined.
class MemoryAccount {
 public:
  // All outlive this.
  struct Facts {
    const v1::JobSpec* spec = nullptr;
    const ShardPlan* plan = nullptr;
    const JobMemory* memory = nullptr;
    const Sessions* sessions = nullptr;
    const GradientWriters* gradient_writers = nullptr;
    const Snapshot* snapshot = nullptr;
    const FullParams* full_params = nullptr;
  };
  // `reserved_by_all`: the sum of reserved_bytes() of all jobs; null: this is the only one.
  MemoryAccount(Facts facts, std::function<int64_t()> reserved_by_all)
      : see_(facts), reserved_by_all_(std::move(reserved_by_all)) {}

  // Promised when the job was opened and allocated only when needed: sessions, the snapshot, the undo of a writeback
  // (on GPUs when one begins), gradients that trainers have given back until the next come.
  int64_t reserved_bytes() const;
  // RESOURCE_EXHAUSTED: no room for the old bytes of a writeback. Where there was when the job opened, processes beside
  // the daemon may have it now; else other jobs may. REQUIRES: ranks have asked for the writeback, so it is among what
  // is reserved.
  absl::Status CheckUndoFits() const;
  void Describe(v1::Memory* out) const;

 private:
  int64_t reserved_undo_bytes() const;
  int64_t allocated_undo_bytes() const;
  void DescribeSessions(v1::Memory* out) const;

  const Facts see_;
  const std::function<int64_t()> reserved_by_all_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_MEMORY_ACCOUNT_H_
