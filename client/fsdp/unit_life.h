#ifndef SHARDD_CLIENT_FSDP_UNIT_LIFE_H_
#define SHARDD_CLIENT_FSDP_UNIT_LIFE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "client/fsdp/group_lives.h"

namespace shardd::fsdp {

// Of torch's FSDPState and FSDPParamGroup.
enum class Training { kIdle, kForward, kPreBackward, kPostBackward };

// A unit: groups that are unsharded and resharded together, because one module of the program has them all. Owns which
// groups those are and where the unit is in forward and backward. A unit may run several times in one forward, and
// again in a backward. Thread-compatible, as a shardd_job.
class UnitLife {
 public:
  // `lives` outlives the unit, or Unbind comes first. A unit may have no group.
  void Bind(GroupLives* lives, std::vector<int32_t> groups);
  void Unbind();
  const std::vector<int32_t>& groups() const { return groups_; }

  // A forward begins. False: one is under way already. REQUIRES: !recomputes().
  bool BeginForward() {
    module_ = Training::kForward;
    return std::exchange(group_, Training::kForward) != Training::kForward;
  }
  bool in_forward() const { return module_ == Training::kForward; }
  // What runs now is a part of the unit's backward.
  bool recomputes() const { return module_ == Training::kPreBackward; }
  void EndForward(bool has_backward);
  // The unit's backward has reached its module. False: its groups know that already.
  bool ReachBackward() {
    module_ = Training::kPreBackward;
    return group_ != Training::kPreBackward;
  }
  void BeginBackward() { group_ = Training::kPreBackward; }
  // Submits what was written.
  Status EndBackward();
  Training training() const { return group_; }
  void SetIdle() { module_ = group_ = Training::kIdle; }

  // All groups that are not held are asked for.
  Status Unshard(shardd_phase phase);
  Status Wait();
  Status ReshardAll();
  bool held() const;
  // Since the last whole backward was closed.
  bool ran_forward() const { return !groups_.empty() && lives_->ran_forward(groups_.front()); }
  // The backward of all units is closed. `whole`: of the whole model, whose forward is over.
  void CloseBackward(bool whole, bool stays_unsharded);
  void AbandonBackward();
  // The attachment is over.
  void Forget();

 private:
  GroupLives* lives_ = nullptr;
  std::vector<int32_t> groups_;  // by the daemon's numbers
  Training module_ = Training::kIdle;
  Training group_ = Training::kIdle;
};

}  // namespace shardd::fsdp

#endif  // SHARDD_CLIENT_FSDP_UNIT_LIFE_H_
