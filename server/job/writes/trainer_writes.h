#ifndef SHARDD_SERVER_JOB_WRITES_TRAINER_WRITES_H_
#define SHARDD_SERVER_JOB_WRITES_TRAINER_WRITES_H_

// Jobs whose trainers write: passes that ranks enter together, and handing in between them.
//
//   rank:  kOutside --HandIn--> (hands in) --EnterPass--> kEntering --all have--> kInside --LeavePass--> kOutside
//
// What a reader sees never changes under it: ranks hand in when no rank is inside, passes begin when nobody hands in.
// With pass_copies there is nothing to wait for but the copies.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/plan/plan.h"
#include "server/job/job_part.h"
#include "server/job/wait.h"
#include "server/job/writes/hand_ins.h"
#include "server/job/writes/passes.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

class AskedSteps;
class Committed;
class Extensions;
class FullParams;
class Pairing;
class Sessions;
class Snapshot;

// Owns where each rank stands between its passes and its writes; decides who may enter, leave and hand in, and tells
// ranks in their pages that they may. Loop-confined. A command that returns an error has changed nothing.
class TrainerWrites final : public JobPart {
 public:
  // All outlive this.
  struct Facts {
    const ShardPlan* plan = nullptr;
    const Committed* committed = nullptr;
    const Sessions* sessions = nullptr;  // of which this writes the words of passes
    const AskedSteps* steps = nullptr;
    const Pairing* pairing = nullptr;
    const FullParams* full_params = nullptr;
    const Extensions* extensions = nullptr;
    const Snapshot* snapshot = nullptr;
  };
  // Whom a rank waits for, out of all that happens in the job.
  using WaitsFor = absl::FunctionRef<Wait(int rank)>;

  // `counters` outlives this.
  TrainerWrites(Facts facts, v1::Counters* counters)
      : see_(facts), counters_(counters), passes_(facts.plan->world_size), hand_ins_(facts.plan->world_size) {}

  const Passes& passes() const { return passes_; }
  const HandIns& hand_ins() const { return hand_ins_; }
  bool trainers_write() const { return !see_.plan->config.trainers_never_write(); }
  bool pass_copies() const { return see_.plan->config.pass_copies(); }

  // Commands -----------------------------------------------------------------------------------------
  // `stepped`: what the rank has written is an optimizer step, and `trainer_state` left to the caller; else this takes
  // it. `signal`: behind what the rank's device did before.
  absl::Status EnterPass(int rank, bool stepped, uint64_t signal, std::string* trainer_state);
  // The rank that enters waits for snapshots before it stores into state that it keeps (kAsksToStore). No-op where its
  // words are told, by events that do not have those of snapshots.
  void AsksToStore(int rank);
  // The rank that enters has stored into its shards since the last version. FAILED_PRECONDITION: it hands that in
  // otherwise.
  absl::Status HasEdits(int rank);
  absl::Status LeavePass(int rank);
  // HandIn.
  absl::Status AskToHandIn(int rank);
  // The rank has sent Step: it has stopped reading, and writing.
  void Step(int rank);

  // Passes -------------------------------------------------------------------------------------------
  // All enter: whether they have sent Step too, whose commit comes before the pass. FAILED_PRECONDITION: they differ.
  absl::StatusOr<bool> StepComesFirst() const;
  bool NoStepComesFirst() const;  // nor will a step: an error says so where it is asked for
  // Ranks that left a forward without its backward and enter another pass, while others have done that backward and
  // wait for their gradients or their step. ReadmitLate lets them go on in the others' pass; nobody writes meanwhile.
  std::vector<int> LateRanks(WaitsFor waits_for) const;
  void ReadmitLate(WaitsFor waits_for);
  // With pass_copies: the ranks' streams may go on to what reads the copies. `sums_under_way`: gradients are being
  // added by trainers, whose streams would hold that up.
  bool MayAnnounce(bool sums_under_way) const { return !passes_.announced() && !sums_under_way; }
  void Announce(bool tell, bool takes_snapshot);
  void BeginSaying() { passes_.BeginSaying(); }
  void AwaitPassDevices(bool awaits) { passes_.AwaitDevices(awaits); }
  // Returns the rank's trainer state, and forgets it; empty: it has given none, or gave it with a step.
  std::string TakeTrainerState(int rank) { return passes_.TakeTrainerState(rank); }
  // What ranks wrote before they entered, and handed in, is about to be a version; the copies of it are made.
  void CommitPass();
  // `to_write_back`: some rank, perhaps of another node, has edits. All are told with the pass that they leave it
  // again, write their edits back together and enter anew.
  void LetInAll(bool to_write_back = false);
  Wait WaitingToEnter(int rank) const;

  // Handing in ---------------------------------------------------------------------------------------
  // No rank is inside a pass or asks for full parameters, and some rank wants to hand in that has not stepped: another
  // may still write before its own step, but a rank that has reads no more and writes only after the commit.
  bool MayHandIn() const;
  void LetHandIn();
  // FAILED_PRECONDITION: a rank writes between a forward and its backward, for which others wait. Each rank is looked
  // at once, however many wait.
  absl::Status CheckStuck(absl::Time now, WaitsFor waits_for) const;
  // With pass_copies: those that ask may store.
  void AwaitStoreDevices(bool awaits) { hand_ins_.AwaitDevices(awaits); }
  void LetStore();
  Wait WaitingToHandIn(int rank) const;
  Wait WaitingToStore(int rank) const;

  void Forget(int rank) override;
  void StepCommitted() override;
  void EndEpoch() override;

 private:
  void CommitHandIns();
  int world_size() const { return see_.plan->world_size; }
  absl::Status CheckTrainersWrite(int rank, absl::string_view what) const;
  absl::Status Error(absl::StatusCode code, int rank, absl::string_view what, absl::string_view fact) const;

  const Facts see_;
  v1::Counters* const counters_;
  Passes passes_;
  HandIns hand_ins_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_TRAINER_WRITES_H_
