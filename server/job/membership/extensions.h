#ifndef SHARDD_SERVER_JOB_MEMBERSHIP_EXTENSIONS_H_
#define SHARDD_SERVER_JOB_MEMBERSHIP_EXTENSIONS_H_

#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/extend.h"

namespace shardd {

// Ranks that ask that another job, with more to train, take their one's place. Owns what each waits for, until all
// have asked for the same and that job is being built. Loop-confined.
class Extensions {
 public:
  using Done = std::function<void(absl::Status)>;
  // Builds the job with all of `done`, each of which it runs once.
  using Build = std::function<void(std::shared_ptr<const Extension>, std::vector<Done> done)>;
  struct Asked {
    std::shared_ptr<const Extension> extension;
    Done done;  // null while it is being built
    Build build;
  };
  using ByRank = std::map<int, Asked>;

  const ByRank& by_rank() const { return by_rank_; }
  bool Has(int rank) const { return by_rank_.count(rank) > 0; }
  bool building() const { return building_; }  // all ranks have asked

  void Ask(int rank, std::shared_ptr<const Extension> extension, Done done, Build build) {
    by_rank_[rank] = {std::move(extension), std::move(done), std::move(build)};
  }
  // A rank that has asked for another plan than the first that asks; by_rank().end(): all agree.
  ByRank::const_iterator FindDifferent() const;
  // Runs the `build` of a rank that has asked, with all that wait. REQUIRES: some rank has asked.
  void StartBuild();
  // The rank asks no more. REQUIRES: Has(rank), and nothing is being built.
  Done Take(int rank);
  // Nobody asks any more; what is being built comes to nothing.
  ByRank TakeAll();
  // Answers all that wait.
  static void Answer(const ByRank& asked, const absl::Status& status);

 private:
  ByRank by_rank_;
  bool building_ = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_MEMBERSHIP_EXTENSIONS_H_
