#ifndef SHARDD_CLIENT_FSDP_GROUP_LIVES_H_
#define SHARDD_CLIENT_FSDP_GROUP_LIVES_H_

#include <cstdint>
#include <vector>

#include "client/fsdp/shell.h"

namespace shardd::fsdp {

// The parameter groups of one attached job as this rank's forward and backward use them: the two machines that
// README.md shows. Owns how often each group is held unsharded, which gradients of it are in its slot and not
// submitted, and which group may write into a slot that several share. An event that
// fails in the shell leaves it as it was.
//
// Thread-compatible, as a shardd_job.
class GroupLives {
 public:
  // The groups of `job`. The shell outlives this.
  GroupLives(Shell& shell, Job& job);
  // `params`: how many parameters each group has; `slots`: of SharedSlots.
  GroupLives(Shell& shell, const std::vector<int32_t>& params, std::vector<int32_t> slots);
  GroupLives(const GroupLives&) = delete;
  GroupLives& operator=(const GroupLives&) = delete;

  // Asks for the parameters; paired with one Reshard. In backward it takes the hold that Prefetch got.
  Status Unshard(int32_t group, shardd_phase phase);
  Status Wait(int32_t group) { return shell_.WaitUnshard(group); }
  // Asks ahead of the Unshard of a backward. REQUIRES: not prefetched.
  Status Prefetch(int32_t group);
  // One hold, which must be there; all that are.
  Status Reshard(int32_t group);
  Status ReshardAll(int32_t group);
  int holds(int32_t group) const { return at(group).holds; }
  bool prefetched(int32_t group) const { return at(group).prefetched; }

  // A forward of the group ran that has a backward: that backward owes a submission, if an empty one.
  void RanForward(int32_t group) { at(group).ran_forward = true; }
  bool ran_forward(int32_t group) const { return at(group).ran_forward; }

  // Until the group may write into its slot. What another group has written there is submitted first; the rest of that
  // one's gradients will be a second submission. Returns at once where it may write already.
  Status PrepareGradients(int32_t group);
  // The gradient of the group's parameter number `index` is in the slot. `fresh`: it replaces what this step has added
  // up. REQUIRES: PrepareGradients, and no Submit since.
  void MarkGradient(int32_t group, int32_t index, bool fresh);
  bool HasGradient(int32_t group, int32_t index) const;
  // Something is in the slot that is not submitted.
  bool written(int32_t group) const { return at(group).written; }
  // What is written; nothing where nothing is.
  Status Submit(int32_t group);
  // At the end of a backward: what is written, and an empty mask where a forward ran and nothing was submitted, which
  // is PyTorch's None and no missing contribution. A rank that has not run the group's forward takes part in its
  // backward all the same. REQUIRES: the group is trainable.
  Status SubmitOwed(int32_t group);

  // A backward is closed. `stays`: the group is still unsharded, for the next one.
  void EndBackward(int32_t group, bool stays);
  // With a whole one: its forward is over.
  void EndForward(int32_t group) { at(group).ran_forward = false; }
  // The job has given this backward up; what is written counts for nothing. Holds stay.
  void AbandonBackward(int32_t group);
  // The attachment is over: nothing is held, written or owed.
  void Forget(int32_t group);

 private:
  struct Group {
    int32_t slot = 0;
    int holds = 0;             // unshards not yet paired with a reshard
    bool prefetched = false;   // one of them was asked ahead and is nobody's yet
    bool stays = false;        // held since an earlier backward, of which the daemon knows nothing in this one
    bool ran_forward = false;  // since the last whole backward ended
    bool slot_ready = false;   // may be written
    bool written = false;
    bool submitted = false;  // in this backward
    std::vector<uint8_t> present;
    std::vector<uint8_t> fresh;
  };
  Group& at(int32_t group) { return groups_[static_cast<size_t>(group)]; }
  const Group& at(int32_t group) const { return groups_[static_cast<size_t>(group)]; }
  static void ClearWritten(Group& group);

  Shell& shell_;
  std::vector<Group> groups_;
  std::vector<int32_t> writers_;  // by slot: the group that was last ready to write into it; -1: none
};

}  // namespace shardd::fsdp

#endif  // SHARDD_CLIENT_FSDP_GROUP_LIVES_H_
