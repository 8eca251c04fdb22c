#ifndef SHARDD_SERVER_JOB_MEMBERSHIP_EXTENSIONS_H_
#define SHARDD_SERVER_JOB_MEMBERSHIP_EXTENSIONS_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/plan/extend.h"
#include "server/job/job_part.h"
#include "server/job/wait.h"
#include "server/multinode/backwards.h"

namespace shardd {

class AskedSteps;
class Committed;
class FullParams;
class HandIns;
class Leavers;
class Pairing;
class Passes;
class Session;
class StepDecision;

// Ranks that ask that another job, with more to train, take their one's place. Owns what each waits for, until all
// have asked for the same and that job is being built. Reads whether ranks may ask, and whether others have gone on.
// Loop-confined.
class Extensions final : public JobPart {
 public:
  // What keeps a rank from asking. All outlive the extensions.
  struct Facts {
    const Committed* committed = nullptr;
    const StepDecision* decision = nullptr;
    const Leavers* leavers = nullptr;
    const AskedSteps* steps = nullptr;
    const Pairing* pairing = nullptr;
    const Passes* passes = nullptr;
    const HandIns* hand_ins = nullptr;
    const FullParams* full_params = nullptr;
  };
  using Done = std::function<void(absl::Status)>;
  // Builds the job with all of `done`, each of which it runs once.
  using Build = std::function<void(std::shared_ptr<const Extension>, std::vector<Done> done)>;
  // Makes what was built the node's job, which this one ends with; on the loop, later. Whoever drops it uncalled drops
  // what was built.
  using TakeItsPlace = std::function<void()>;
  struct Asked {
    std::shared_ptr<const Extension> extension;
    Done done;  // null while it is being built
    Build build;
  };
  using ByRank = std::map<int, Asked>;

  Extensions(int ranks, Facts facts) : ranks_(ranks), see_(facts) {}

  const ByRank& by_rank() const { return by_rank_; }
  bool Has(int rank) const { return by_rank_.count(rank) > 0; }
  bool building() const { return building_; }  // all ranks have asked, or other nodes train more already
  bool all_asked() const { return static_cast<int>(by_rank_.size()) == ranks_; }

  // FAILED_PRECONDITION: the rank is in the middle of something, or another takes part in nothing any more.
  absl::Status CheckMayAsk(int rank) const;
  // FAILED_PRECONDITION: another rank has gone on where this one asks for `what`, and would wait for it.
  absl::Status CheckNobodyWentOn(int rank, const std::string& what) const;
  // FAILED_PRECONDITION: ranks have asked for different things. REQUIRES: some rank has asked.
  absl::Status CheckEqual() const;
  // FAILED_PRECONDITION: another rank has finished, or asks for more to train, whom `rank` would need for `what`, in
  // the backward if it is one; so it would wait for ever.
  absl::Status CheckAllTakePart(int rank, absl::string_view what, int backward = kAllBackwards) const;
  // The same of who asks for more to train alone: for what needs nothing of who has finished.
  absl::Status CheckNobodyAsks(int rank, absl::string_view what, int backward = kAllBackwards) const;
  Wait WaitingFor(int rank) const;

  void Ask(int rank, std::shared_ptr<const Extension> extension, Done done, Build build) {
    by_rank_[rank] = {std::move(extension), std::move(done), std::move(build)};
  }
  // Runs the `build` of a rank that has asked, with all that wait. REQUIRES: some rank has asked.
  void StartBuild();
  // Over several nodes, before StartBuild: all ranks have asked, and this node asks the others. Returns what for.
  // REQUIRES: all_asked().
  const Extension& BeginAsking();
  // ... and has not heard that they do, so that StartBuild may follow.
  bool awaits_nodes() const { return building_ && !by_rank_.empty() && by_rank_.begin()->second.build != nullptr; }
  // ... this node has built it, and nobody uses it before all nodes have theirs.
  void Built(TakeItsPlace take);
  bool has_built() const { return built_ != nullptr; }  // ... and waits for the others
  bool decided() const { return decided_; }             // what was built is about to be the node's job
  // All nodes have: whatever becomes of the ranks now, the job is what was built. Null: nothing was.
  TakeItsPlace TakeBuilt();

  // Other nodes train more already, as this node learns when it meets them again. Ranks wait for that outside.
  void Widen(std::shared_ptr<const Extension> extension, Build build);
  bool widens() const { return widening_.extension != nullptr; }
  // `now`, here and below, as MonotonicNow.
  bool MayWiden(absl::Time now) const { return widens() && !building_ && now >= widen_at_; }
  // REQUIRES: MayWiden(); no rank has a session.
  void StartWidening();
  // What was to be built could not be, and may be tried again after `pause`. Returns for how long it could not be, of
  // what `counts`. REQUIRES: widens().
  absl::Duration PutOffWidening(absl::Time now, absl::Duration pause, bool counts = true);
  absl::Status CheckMayBegin(const std::string& what) override;

  // The rank goes on: if it has asked, it asks no more, and is answered. FAILED_PRECONDITION: the job is being built.
  absl::Status GoOn(int rank);
  // Nobody asks any more; what is being built comes to nothing.
  ByRank TakeAll();
  // What is being built, or asked of other nodes, comes to nothing without the rank. Whoever waits for that is told
  // ABORTED, unless the builder is to answer.
  void SessionEnds(Session* session) override;
  // Answers all that wait.
  static void Answer(const ByRank& asked, const absl::Status& status);

 private:
  absl::Status AloneError(int rank, absl::string_view what, int asking, const std::string& extension) const;

  const int ranks_;
  const Facts see_;
  ByRank by_rank_;
  bool building_ = false;
  bool decided_ = false;                               // TakeBuilt was called
  TakeItsPlace built_;                                 // null: nothing is
  Asked widening_;                                     // without `done`; null: nothing is to be
  absl::Time widen_at_ = absl::InfinitePast();         // not before
  absl::Time put_off_since_ = absl::InfiniteFuture();  // the first time
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_MEMBERSHIP_EXTENSIONS_H_
