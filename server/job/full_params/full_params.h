#ifndef SHARDD_SERVER_JOB_FULL_PARAMS_FULL_PARAMS_H_
#define SHARDD_SERVER_JOB_FULL_PARAMS_FULL_PARAMS_H_

// Full parameters: all ranks enter together, some of them read, perhaps write, and leave. Who only reads enters without
// those who have finished.
//
//   rank:  outside --Ask--> asked --Grant (all have asked)--> inside --Leave--> outside
//                              \--Refuse (all)--> outside

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"

namespace shardd {

// What a rank asks for; equal on all ranks.
struct FullParamsRequest {
  bool writeback = false;
  bool rank0_only = false;
  bool with_grads = false;
  bool recurse = true;
  int group = -1;         // -1: the whole model
  bool of_edits = false;  // ranks write back what each has stored into its shards

  bool OnlyReads() const { return !writeback && !with_grads; }
};
// `flags` and `group` of an EnterFullParams command.
FullParamsRequest ParseFullParams(uint32_t flags, int group);
// Whether jobs of this plan serve the request; an error's message is the fact alone. Pure.
absl::Status CheckFullParams(const ShardPlan& plan, const FullParamsRequest& request, bool over_nodes);

// Owns what each rank has asked for and whether it is inside. Loop-confined.
class FullParams {
 public:
  explicit FullParams(int ranks) : ranks_(ranks) {}

  // The rank has asked to enter, and has not left.
  bool asked(int rank) const { return ranks_[rank].asked; }
  bool inside(int rank) const { return ranks_[rank].inside; }
  // It has asked with writeback, and what it writes is not committed.
  bool writes(int rank) const { return ranks_[rank].writes; }
  const FullParamsRequest& request(int rank) const { return ranks_[rank].request; }
  bool AnyAsked() const { return agreed() != nullptr; }
  // What ranks that have asked have asked for; null: none has.
  const FullParamsRequest* agreed() const;
  bool AnyInside() const;
  bool AnyWrites() const;
  // Ranks are inside, or are let in as soon as gradients are settled.
  bool granted() const { return granted_; }
  // The entry waits for signals of the ranks' devices.
  bool awaits_devices() const { return awaits_devices_; }
  // Signals behind which the rank's device has done with what it did before it entered, and inside. 0: at once.
  uint64_t entry_signal(int rank) const { return ranks_[rank].entry_signal; }
  uint64_t leave_signal(int rank) const { return ranks_[rank].leave_signal; }

  // FAILED_PRECONDITION: the request differs from one of a rank that waits to enter. The message is the fact alone.
  absl::Status CheckEqual(int rank, const FullParamsRequest& request) const;
  // The same, for writing a parameter. REQUIRES: the rank is inside.
  absl::Status CheckMayWrite(const ShardPlan& plan, int rank, int param) const;

  void Ask(int rank, const FullParamsRequest& request, uint64_t signal);
  void AwaitDevices(bool awaits) { awaits_devices_ = awaits; }
  // No rank is let in: all are where they were before they asked.
  void Refuse();
  // What is granted cannot be refused any more.
  void BeginGrant() { granted_ = true; }
  // Lets all ranks in that have asked. `params`: which parameters they have asked for.
  void Grant(std::vector<bool> params);
  // What was written is a version's.
  void WritesCommitted();
  // REQUIRES: the rank is inside. True: it was the last one.
  bool Leave(int rank, uint64_t signal);
  // All devices have come to their leave signals.
  void LeaveSignalsCame();
  // The rank takes no part in this step any more.
  void Forget(int rank) { ranks_[rank] = OfRank(); }
  void EndEpoch();

 private:
  struct OfRank {
    bool asked = false;
    bool inside = false;
    bool writes = false;
    FullParamsRequest request;
    uint64_t entry_signal = 0;
    uint64_t leave_signal = 0;
  };
  std::vector<OfRank> ranks_;
  bool granted_ = false;
  bool awaits_devices_ = false;
  std::vector<bool> params_;  // by parameter, while ranks are inside
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_FULL_PARAMS_FULL_PARAMS_H_
