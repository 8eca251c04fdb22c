#ifndef SHARDD_SERVER_JOB_GRADIENTS_GIVEN_BY_OTHERS_H_
#define SHARDD_SERVER_JOB_GRADIENTS_GIVEN_BY_OTHERS_H_

// Gradients that some ranks gave and others did not, as of an expert without tokens on a rank. The reduced gradient is
// everybody's: a rank that gave nothing of it has its rows all the same, and asks which gradients these are
// (TrainerService.OthersGradients).

#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "common/plan/plan.h"

namespace shardd {

// Owns, by rank of this node and parameter, the backwards of the running step in which others gave a gradient and the
// rank did not. Loop-confined.
class GivenByOthers {
 public:
  explicit GivenByOthers(std::shared_ptr<const ShardPlan> plan);

  // What a rank gives of a group, by index_in_group.
  struct Part {
    int rank = 0;
    const std::vector<bool>* present = nullptr;
  };
  // An occurrence of the group in the backward is about to be added: `parts`, of this node's ranks; those without a
  // part give nothing. `by_all`: what ranks of all nodes give; null: there is one node. Returns the ranks that give
  // less than all together, in order.
  std::vector<int> Note(int backward, int group, absl::Span<const Part> parts, const std::vector<bool>* by_all);
  // The rank has taken back what it gave of the group, and what of it is added stays: `added`, by index_in_group.
  void NoteTakenBack(int rank, int backward, int group, const std::vector<bool>& added);
  // Nobody gave it, after all.
  void Forget(int param) { lacked_[static_cast<size_t>(param)].clear(); }

  // The rank, which has closed `closed` backwards, asks for the parameters that it lacked in backward `first` or later;
  // ascending.
  std::vector<int> Ask(int rank, int first, int closed);
  // Some rank lacked something of the group in this step.
  bool OfGroup(int group) const { return of_group_[static_cast<size_t>(group)]; }
  // The rank lacked it before `backward`, in a backward that it has not asked about: it cannot know that there is a
  // gradient of it.
  bool IsUnaware(int rank, int param, int backward) const;

  // Another step begins.
  void Clear();

 private:
  static constexpr int kNever = -1;
  struct Lacks {
    int first = kNever;  // of those that it has not asked about
    int last = kNever;
  };
  void Lacked(int rank, int param, int backward);

  const std::shared_ptr<const ShardPlan> plan_;
  std::vector<std::vector<Lacks>> lacked_;  // by parameter, by rank; empty: no rank lacked it
  std::vector<bool> of_group_;              // by group: some of its parameters were lacked
  std::vector<int> asked_;                  // by rank: about backwards before this one
  std::vector<int> last_;                   // by rank: in which it lacked anything; kNever: in none
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_GRADIENTS_GIVEN_BY_OTHERS_H_
