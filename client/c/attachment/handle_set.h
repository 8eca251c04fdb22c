#ifndef SHARDD_CLIENT_C_ATTACHMENT_HANDLE_SET_H_
#define SHARDD_CLIENT_C_ATTACHMENT_HANDLE_SET_H_

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "client/c/attachment/rank_plan.h"
#include "common/handle/handle.h"

namespace shardd {

// Owns the rank's handle of each parameter group. Parts of the job check every request here before they write its
// record, so that a mistake is an error in the call that made it. Each Apply returns FAILED_PRECONDITION and changes no
// handle if one of them forbids the event. Thread-compatible.
class HandleSet {
 public:
  explicit HandleSet(const RankPlan& plan) : plan_(plan) {}
  // Begins a new session.
  void Reset() { handles_.assign(plan_.groups(), Handle()); }

  const Handle& of(int group) const { return handles_[static_cast<size_t>(group)]; }
  // Tells whether full parameters are entered, or being entered. Every handle has that state then.
  bool in_full_params() const { return !handles_.empty() && handles_.front().training() == TrainingState::kFullParams; }

  absl::Status Apply(int group, HandleEvent event) {
    return handles_[static_cast<size_t>(group)].Apply(event, plan_.group_name(group), plan_.rank());
  }
  // Applies `event` to the group and to the groups that it also unshards.
  absl::Status ApplyWithTied(int group, HandleEvent event);
  absl::Status ApplyToAll(HandleEvent event);
  // Ends an unshard that is under way.
  absl::Status Arrive(int group) {
    return of(group).storage() == StorageState::kUnsharding ? Apply(group, HandleEvent::kUnshardDone)
                                                            : absl::OkStatus();
  }

  // Graphs restore the handles after their calls were noted: each launch applies the same events again.
  const std::vector<Handle>& all() const { return handles_; }
  std::vector<Handle> Exchange(std::vector<Handle> handles) { return std::exchange(handles_, std::move(handles)); }

 private:
  const RankPlan& plan_;
  std::vector<Handle> handles_;  // by group
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_ATTACHMENT_HANDLE_SET_H_
