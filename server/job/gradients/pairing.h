#ifndef SHARDD_SERVER_JOB_GRADIENTS_PAIRING_H_
#define SHARDD_SERVER_JOB_GRADIENTS_PAIRING_H_

// Gradients as ranks give them. They are paired by (backward, group, occurrence), never by position: the n-th
// submission of a group in a backward of one rank meets the n-th of every other. This decides which submissions are
// added together, which gradients a sum replaces or adds to, and who waits for whom; somebody else adds them.
//
// Owns: how many backwards each rank has closed, what it has submitted and not got added, what lies in its gradient
// slots, which gradient shards hold a gradient (GradientPresence), and which gradients some ranks gave alone
// (GivenByOthers).

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/plan/plan.h"
#include "server/collective/gradient_mode.h"
#include "server/job/gradients/given_by_others.h"
#include "server/job/gradients/gradient_presence.h"
#include "server/job/wait.h"
#include "server/session/rank_command.h"

namespace shardd {

class Committed;
struct GivenGradients;

using PairKey = std::pair<int, int>;  // (backward, group)

// One rank's submission of a group. Masks are by index_in_group.
struct Contribution {
  std::vector<bool> present;
  std::vector<bool> fresh;  // replaces what the sum holds
  uint64_t done = 0;        // the signal with which the slot may be read
  bool asks = false;        // the rank asks what others gave (kAsksForOthers)
};

// Loop-confined. A method that returns an error has changed nothing, unless it says otherwise.
class Pairing {
 public:
  // `committed` outlives this, and is read for errors.
  Pairing(std::shared_ptr<const ShardPlan> plan, const Committed* committed);

  GradientPresence& presence() { return presence_; }
  const GradientPresence& presence() const { return presence_; }
  GivenByOthers& given_by_others() { return given_by_others_; }

  // Backwards ----------------------------------------------------------------------------------------
  // How many the rank has closed in this step; kAllBackwards: it has asked for the step.
  int closed(int rank) const { return ranks_[static_cast<size_t>(rank)].closed; }
  int closed_by_all() const;
  bool SomeAreBehind(int backward) const;  // have closed fewer than `backward`
  // The signal with which the rank closed the backward; nullopt: it has not said.
  std::optional<uint64_t> DoneAtClose(int rank, int backward) const;
  // Gradients have come since the step began, from ranks or from other nodes.
  bool any_seen() const { return any_seen_; }
  void SetAnySeen() { any_seen_ = true; }
  // Nothing waits, and nothing that is closed by some but not all has come.
  bool empty() const { return pairs_.empty(); }

  // Giving -------------------------------------------------------------------------------------------
  // The rank's submission as the command says, checked: its slot is free, and it marks no frozen parameter. `what`
  // names the call in errors. REQUIRES: the group has something to train.
  absl::StatusOr<Contribution> Check(int rank, RankCommand command, absl::string_view what) const;
  // It waits to be added from here on, in the backward that the rank has open.
  PairKey Give(int rank, int group, Contribution contribution);
  // FAILED_PRECONDITION: a rank has closed the backward without a group that others submitted.
  absl::Status CheckMissing(PairKey key) const;
  absl::Status CheckMissing(int rank, PairKey key) const;
  // RESOURCE_EXHAUSTED: the step has too many backwards.
  absl::Status CheckMayClose(int rank) const;
  // The rank closes its open backward, or with CloseAll the step. Returns the pairs that it concerns. `done`: the
  // signal behind what the rank's device does in the backward.
  std::vector<PairKey> Close(int rank, uint64_t done);
  std::vector<PairKey> CloseAll(int rank);
  // FAILED_PRECONDITION: the rank has submitted something in a backward that it has not closed.
  absl::Status CheckClosed(int rank, absl::string_view what) const;
  // Some rank has submitted something in backward `backward` or a later one; with `rank`: this rank has.
  bool SomeGaveFrom(int backward) const;
  bool GaveFrom(int rank, int backward) const;
  // A group that the rank has submitted in its open backward; -1: there is none.
  int GivenInOpenBackward(int rank) const;
  // The rank gives its open backward up. What waits is taken back; what is in the sums stays, and stands for what the
  // rank submits when it does the backward again.
  struct Abandoned {
    std::vector<int> freed_slots;
    int taken_back = 0;
    int stays = 0;
  };
  Abandoned Abandon(int rank);
  // What a trainer says of a gradient between backwards: dropped (not present), or written by itself. `committing`: the
  // step is being committed.
  absl::Status SetPresence(int rank, int64_t param, bool present, bool committing);

  // Adding -------------------------------------------------------------------------------------------
  // The ranks that give something to the pair's current occurrence, which may be none where all that they gave was
  // added before its turn; nullopt: nothing was given, or something may still come.
  std::optional<std::vector<int>> Complete(PairKey key) const;
  // Settles what was said of the group's gradients before the backward: by parameter, which ranks have some
  // (TakeUneven).
  GradientPresence::Uneven Settle(PairKey key);
  GradientPresence::Uneven SettleAll();
  // FAILED_PRECONDITION, once: on several nodes, ranks of this one have dropped what others have not.
  absl::Status TakeUneven();
  // What `ranks` give, in their order, and what to do with it, by index_in_group. `others`: what all nodes give. After
  // an error the step cannot go on.
  struct Sum {
    std::vector<GradientMode> modes;
    std::vector<Contribution> given;
    // Ranks of this node that give less than all together.
    std::vector<int> lacking;
  };
  absl::StatusOr<Sum> Take(PairKey key, const std::vector<int>& ranks, const GivenGradients* others);
  // The occurrence is complete, the next one begins.
  void NextOccurrence(PairKey key);
  // Nothing can come for the pair any more.
  void ForgetIfClosed(PairKey key);

  // Adding before its turn. All ranks sleep, or have stepped: the slot in which the rank sleeps is added with what
  // others have given by now; nullopt: the rank's slot waits for nothing.
  struct Early {
    PairKey key;
    std::vector<int> ranks;
  };
  absl::StatusOr<std::optional<Early>> BeforeTurn(int rank) const;
  void AddedBeforeTurn(const Early& early);

  // Several nodes ------------------------------------------------------------------------------------
  // This node's part of the pair's occurrence, to be said to node 0; nullopt: it was said.
  struct Said {
    int occurrence = 0;
    std::vector<bool> present;
    std::vector<bool> fresh;
  };
  std::optional<Said> Say(PairKey key, const std::vector<int>& ranks);
  bool AwaitsNodes() const;  // something was said and not added
  // Of these, the occurrence that is to be added now: ranks whose part was said, none where this node gives nothing.
  std::vector<int> ToldToAdd(PairKey key, int occurrence);
  void AddedOverNodes(PairKey key, int occurrence);
  // How many backwards are closed here and have nothing left to say.
  int ClosedToSay() const;

  // Gradient slots -----------------------------------------------------------------------------------
  bool HoldsSlot(int rank, int slot) const { return of(rank).slots[static_cast<size_t>(slot)].has_value(); }
  void FreeSlot(int rank, int slot);
  // The rank's client sleeps until the slot is free, or it sends something.
  void Sleep(int rank, int slot) { of(rank).sleeps_for = slot; }
  void Wake(int rank) { of(rank).sleeps_for = -1; }
  bool sleeps(int rank) const { return of(rank).sleeps_for >= 0; }
  bool SleepsForTurn(int rank) const;  // and what is in the slot waits to be added
  Wait WaitingFor(int rank) const;

  // Ends ---------------------------------------------------------------------------------------------
  void EndStep();
  void EndEpoch();
  void Forget(int rank);  // it is gone; a successor begins with nothing of it

 private:
  struct Rank {
    int closed = 0;
    std::set<int> abandoned;  // given up by user code, and nothing submitted in them since: what is missing is no error
    std::vector<std::optional<PairKey>> slots;  // by slot: what is in it
    int sleeps_for = -1;                        // slot
    std::vector<uint64_t> done_at_close;        // by backward
  };
  // The submissions for one (backward, group), by rank and occurrence.
  struct Pair {
    std::vector<std::deque<Contribution>> waiting;  // by rank; front: the current occurrence
    std::vector<int> submitted;                     // by rank; without what was taken back
    std::vector<int> added;                         // by rank: of these, in the gradient shards or on the way
    // By rank: of these, of an attempt that it has given up; each stands for one submission to come.
    std::vector<int> stays;
    std::vector<int> folded;       // by rank: occurrences added ahead of their turn, from the current one
    std::vector<uint8_t> touched;  // by index_in_group: written by a part of this occurrence
    std::vector<uint8_t> given;    // by index_in_group: written by an earlier occurrence, of whichever ranks
    std::vector<uint8_t> own;      // by index_in_group: the sum began in this backward, which gave all of it
    int occurrence = 0;            // of the current one
    bool said = false;             // several nodes: to node 0 that it is complete
  };

  Rank& of(int rank) { return ranks_[static_cast<size_t>(rank)]; }
  const Rank& of(int rank) const { return ranks_[static_cast<size_t>(rank)]; }
  int world_size() const { return plan_->world_size; }
  const std::string& group_name(int group) const { return plan_->groups[static_cast<size_t>(group)].name; }
  absl::Status Error(absl::StatusCode code, int rank, absl::string_view what, absl::string_view fact) const;
  Pair& GetPair(PairKey key);
  GradientPresence::Uneven NoteUneven(GradientPresence::Uneven uneven);
  // (pairing_sums.cc)
  void FollowHolders(PairKey key, Pair& pair, const std::vector<int>& ranks);
  std::vector<bool> DropWhatStays(PairKey key, Pair& pair, const std::vector<int>& ranks);
  void BeginAnew(PairKey key, Pair& pair, const std::vector<int>& ranks);
  void EndOccurrence(Pair& pair);
  absl::Status ChooseModes(PairKey key, Pair& pair, const std::vector<int>& ranks, const std::vector<bool>& again,
                           const GivenGradients* others, std::vector<GradientMode>* modes);

  const std::shared_ptr<const ShardPlan> plan_;
  const Committed* const committed_;
  std::vector<Rank> ranks_;
  std::map<PairKey, Pair> pairs_;
  GradientPresence presence_;
  GivenByOthers given_by_others_;
  bool any_seen_ = false;
  absl::Status uneven_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_GRADIENTS_PAIRING_H_
