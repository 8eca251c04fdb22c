#ifndef SHARDD_SERVER_JOB_GRADIENTS_GRADIENT_PRESENCE_H_
#define SHARDD_SERVER_JOB_GRADIENTS_GRADIENT_PRESENCE_H_

// Which gradient shards hold a gradient, and what trainers have said about that between backwards: dropped (None), or
// written by themselves. It is agreed like the presence of submissions: what any rank has is present, a rank that has
// none counts as zero, what none has is absent.

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "common/plan/plan.h"

namespace shardd {

// What a rank has said of its part of a gradient shard, and how many backwards it had closed then.
struct SaidPresence {
  int closed_backwards = 0;
  bool present = false;
  // Not present, though the sum holds a first try of the rank's that it has given up: counts if all ranks say so.
  bool of_first_try = false;
};

// Loop-confined.
class GradientPresence {
 public:
  explicit GradientPresence(std::shared_ptr<const ShardPlan> plan);

  bool has(int param) const { return present_[static_cast<size_t>(param)]; }
  const std::vector<bool>& by_param() const { return present_; }
  // Set, with `present`, in the running step: what a shard has had since before a step of the trainers' is not of it.
  bool IsOfStep(int param) const { return of_step_[static_cast<size_t>(param)]; }
  void BeginStep() { of_step_.assign(of_step_.size(), false); }
  void Set(int param, bool present) {
    present_[static_cast<size_t>(param)] = of_step_[static_cast<size_t>(param)] = present;
  }
  void SetAll(std::vector<bool> present) { present_ = std::move(present); }  // by parameter
  // Nothing is present: a step is committed.
  void Clear();
  // Likewise, and nothing was said: an epoch has ended.
  void Reset();

  // A word replaces the one before of the same rank and parameter.
  void Say(int rank, int param, const SaidPresence& word);
  void Unsay(int rank, int param) { said_[static_cast<size_t>(rank)].erase(param); }
  void Forget(int rank) { said_[static_cast<size_t>(rank)].clear(); }  // it is gone
  // The rank has said something of the parameter that comes before what backward `backward` adds.
  bool IsSaid(int rank, int param, int backward) const;

  // Ranks that hold some of its gradient; all of them, where none holds anything. What others say of it does not count:
  // they have nothing that could be dropped, written or replaced, and may not be able to tell.
  const std::vector<bool>& Holders(int param);  // by rank

  // By parameter that some of its holders have and some do not: which ranks have.
  using Uneven = absl::flat_hash_map<int, std::vector<bool>>;
  // What was said of `params` before backward `backward` has its effect, and is forgotten.
  Uneven Settle(const std::vector<int>& params, int backward);
  // Whatever was said.
  Uneven SettleAll();

 private:
  bool SettleParam(int param, int backward, std::vector<bool>* has);

  const std::shared_ptr<const ShardPlan> plan_;
  std::vector<bool> present_;                            // by parameter
  std::vector<bool> of_step_;                            // by parameter
  std::vector<std::map<int, SaidPresence>> said_;        // by rank, by parameter
  bool some_said_ = false;                               // false: `said_` is empty
  absl::flat_hash_map<int, std::vector<bool>> holders_;  // by parameter that was asked for
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_GRADIENTS_GRADIENT_PRESENCE_H_
