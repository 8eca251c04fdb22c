// Gradient slots: issued, and released, when what was in them is to be added, or is.

#include "server/job/job_core.h"

namespace shardd {

void JobCore::OnReduced(int group, const std::vector<int>& ranks, const std::vector<bool>& stream_ordered) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    trace_.Reduced(ranks[i], group, committed_.step() + 1);
    ReleaseSlot(ranks[i], plan_->groups[group].gradient_slot, stream_ordered[i]);
  }
}

void JobCore::IssueSlot(int rank, int slot, bool stream_ordered) {
  if (stream_ordered) {  // its next submission waits for this one where it writes, and so does what reads it
    ranks_[rank].slot_holder[slot].reset();
    if (ranks_[rank].blocked_slot == slot) {
      ranks_[rank].blocked_slot = -1;
    }
  }
  if (!sums_.by_trainers()) {
    sessions_[rank]->words().PublishSlotIssued(slot);
  }
}

void JobCore::ReleaseSlot(int rank, int slot, bool stream_ordered) {
  trace_.Released(rank, slot);
  if (!stream_ordered) {
    ranks_[rank].slot_holder[slot].reset();
    if (ranks_[rank].blocked_slot == slot) {
      ranks_[rank].blocked_slot = -1;
    }
  }
  sessions_[rank]->words().PublishSlotReleased(slot);
  if (sums_.by_trainers()) {
    sessions_[rank]->words().PublishSlotIssued(slot);  // README.md says why not before
  }
}

void JobCore::OnWaitGradientSlot(Session* session, int group) {
  const int slot = plan_->groups[group].gradient_slot;
  RankStep& state = ranks_[session->rank()];
  if (slot >= 0 && state.slot_holder[slot].has_value()) {
    state.blocked_slot = slot;
  }
}

}  // namespace shardd
