#ifndef SHARDD_CLIENT_C_ATTACHMENT_HANDLE_SET_H_
#define SHARDD_CLIENT_C_ATTACHMENT_HANDLE_SET_H_

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "client/c/attachment/rank_plan.h"
#include "common/handle/handle.h"

namespace shardd {

// Owns the rank's handle of each parameter group: every request is checked here before a record of it is written, so
// that a mistake is an error in the call that made it. Thread-compatible. Each Apply: FAILED_PRECONDITION with no
// handle changed, where one of them forbids the event.
class HandleSet {
 public:
  explicit HandleSet(const RankPlan& plan) : plan_(plan) {}
  // As in a new session.
  void Reset() { handles_.assign(plan_.groups(), Handle()); }

  const Handle& of(int group) const { return handles_[static_cast<size_t>(group)]; }
  // Between EnterFullParams and LeaveFullParams, which every handle takes part in.
  bool in_full_params() const { return !handles_.empty() && handles_.front().training() == TrainingState::kFullParams; }

  absl::Status Apply(int group, HandleEvent event) {
    return handles_[static_cast<size_t>(group)].Apply(event, plan_.group_name(group), plan_.rank());
  }
  // To the group and those that it also unshards.
  absl::Status ApplyWithTied(int group, HandleEvent event);
  absl::Status ApplyToAll(HandleEvent event);
  // What the group has asked for is there.
  absl::Status Arrive(int group) {
    return of(group).storage() == StorageState::kUnsharding ? Apply(group, HandleEvent::kUnshardDone)
                                                            : absl::OkStatus();
  }

  // For graphs, whose calls change handles while they are noted, and again with each launch.
  const std::vector<Handle>& all() const { return handles_; }
  std::vector<Handle> Exchange(std::vector<Handle> handles) { return std::exchange(handles_, std::move(handles)); }

 private:
  const RankPlan& plan_;
  std::vector<Handle> handles_;  // by group
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_ATTACHMENT_HANDLE_SET_H_
