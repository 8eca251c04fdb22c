#ifndef SHARDD_SERVER_JOB_STEP_COMMITTED_H_
#define SHARDD_SERVER_JOB_STEP_COMMITTED_H_

// What a job has committed beside its slabs, and its journal: the epoch, the version, the step, how often each
// parameter was updated, and what trainers keep. Nobody else writes any of it. The journal's header says the same as
// this object whenever a call returns, and before the job's parts hear of a commit.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/device/device_op.h"
#include "server/job/job_part.h"
#include "server/job/step/rank_error.h"
#include "server/storage/take_up_facts.h"
#include "shardd/v1/jobs.pb.h"
#include "shardd/v1/journal.pb.h"

namespace shardd {

class Journal;
class TakeUpLog;

// What a job takes over from the one whose place it takes.
struct CommittedFacts {
  uint64_t epoch = 1;
  uint64_t version = 0;
  int64_t step = 0;
  std::vector<int64_t> step_counts;         // by parameter
  std::vector<std::string> trainer_states;  // by rank
  v1::Counters counters;
  bool in_snapshot = false;       // the shards hold nothing yet: the memory's snapshot is of the step
  bool shards_in_copies = false;  // of that snapshot: they are what passes read
  std::optional<bool> second_snapshot = std::nullopt;  // of two, whether it is the second one; nothing: there is one
  // Several nodes: the step behind it, by the daemon before.
  std::optional<v1::PromisedStepRecord> promised = std::nullopt;
  // Likewise values that are to be the next version. One of the two at most.
  std::optional<v1::PromisedValuesRecord> promised_values = std::nullopt;
  std::vector<bool> finished = {};  // by rank; empty: none has
  bool gradients_stay = false;      // those of the daemon before, which nobody knows who may still write
  uint64_t generation = 0;          // as Committed::generation
};

// Loop-confined.
class Committed {
 public:
  // `job`: its name, for the log.
  Committed(std::string job, int params, int ranks, std::unique_ptr<Journal> journal);
  ~Committed();

  uint64_t epoch() const { return epoch_; }
  uint64_t version() const { return version_; }  // 0: there are no parameters yet
  // Over nodes: in which of their generations the version was decided or agreed on; 0: not known. Then of the next one,
  // which is about to be committed.
  uint64_t generation() const { return generation_; }
  uint64_t next_generation() const { return next_generation_; }
  int64_t step() const { return step_; }
  // By parameter, with counts that were loaded and not committed yet.
  const std::vector<int64_t>& step_counts() const { return *step_counts_; }
  // The same for other threads: it never changes. The next change makes a copy of its own.
  std::shared_ptr<const std::vector<int64_t>> ShareStepCounts() const;
  const std::vector<std::string>& trainer_states() const { return trainer_states_; }  // by rank
  // An error of the rank in the running step: "WHAT: FACT (rank=R, step=S)".
  absl::Status RankError(absl::StatusCode code, int rank, absl::string_view what, absl::string_view fact) const {
    return RankErrorAt(step_, code, rank, what, fact);
  }

  // The job outlives this daemon: `log` tells the next one what is committed. Before anything else; null: it does not.
  void KeepIn(std::unique_ptr<TakeUpLog> log);
  bool outlives_daemon() const { return log_ != nullptr; }
  // ... and there is something to go on with.
  bool next_daemon_goes_on() const { return log_ != nullptr && !custody_ended_ && version_ > 0; }
  // Where the rank's updates write what they are about to change; null: nowhere. The update of the next step begins.
  UpdateLog* BeginUpdate(int rank);
  // Its parts, of which others than the first have logs of their own. REQUIRES: BeginUpdate was called.
  void LogByPart(int rank, std::vector<DeviceOp>* parts, int count);
  // The rank has a session of this process, or has let go of all that it had.
  void SetProcess(int rank, const FormerProcess& process);
  void ForgetProcess(int rank, bool finished);
  // No other daemon takes the job up any more: its memory is no longer wanted.
  void EndCustody();
  bool custody_ended() const { return custody_ended_; }
  // A snapshot of the step, with what trainers keep, is what another daemon goes back to until the next commit.
  void CountSnapshot(int64_t step, const std::vector<std::string>& trainer_states);
  struct SnapshotOf {
    uint64_t version = 0;  // the one that is about to be committed, or that is
    int64_t step = 0;
    std::vector<bool> updated;  // by parameter, since the committed step; empty: none that is counted here
  };
  // The same for good, for trainers that store at any time: from here on commits say nothing of shards. The snapshot is
  // being taken, of shards into which nobody stores meanwhile.
  void BeginSnapshot(const SnapshotOf& of, const std::vector<std::string>& trainer_states);
  // Over nodes: what is committed from here on is what that one of two snapshots has, the second or the first.
  void CommitsSnapshot(bool second) { second_snapshot_ = second; }
  // Its shards may be what passes read: no log of an older daemon, which would not look for them there, says where.
  bool snapshot_may_be_in_copies() const;
  // It is taken, or another daemon has left one. `shards_in_copies`: as of TakeUpLog.
  void SnapshotTaken(bool shards_in_copies = false);
  // What is left of it is copied behind the pass (TakeUpLog::SnapshotIsBehind).
  void SnapshotIsBehind();
  // Only before anything else but KeepIn, which tells its log nothing.
  void TakeOver(const CommittedFacts& facts);
  // `job` hears of commits from here on, and outlives this.
  void Tell(JobPart* job) { parts_ = job; }
  void EndEpoch();
  // The same behind a decided step that is applied, and committed next: the log hears of both together.
  void EndEpochBehindStep() { ++epoch_; }
  // The same where the job is closed here: the log says no more of it, so that another daemon completes what this one
  // had decided, unless EndCustody comes.
  void EndLastEpoch();
  // A step is decided and about to change shards. RESOURCE_EXHAUSTED: its record is too large, and nothing is decided.
  absl::Status Decide(const v1::DecidedStepRecord& record);
  // Several nodes: another node is about to hear that the step is reduced here, and may decide it.
  void Promise(v1::PromisedStepRecord record);
  // All nodes have agreed on values in that generation: they are the next version.
  void AgreesOnValues(uint64_t generation) { next_generation_ = generation; }
  // As Promise for values that are to be the next version, with the counts that were loaded with them.
  // `trainer_states`: of a pass, as in the record; empty: none.
  void PromiseValues(uint64_t generation, const std::vector<std::string>& trainer_states = {});
  // Where parameters are cut over nodes: values of ranks that are no version lie in the shards from here on, or do not
  // any more (TakeUpLog::SetWriting).
  void SetWriting(bool writing);
  // ... this node's ranks have finished, and it goes on for the others.
  void Finish();
  // One more step, and with it one more version. `updated`: by parameter; empty: none that is counted here.
  void CommitStep(const std::vector<bool>& updated, std::vector<std::string> trainer_states);
  // One more version, of the same step.
  void CommitVersion() { CommitVersion(nullptr, Changed::kFacts); }
  // ... which has values from trainers.
  void CommitValues();
  // What the rank keeps changes without a step: with the version that follows, or with CommitTrainerStates.
  void SetTrainerState(int rank, std::string state);
  void CommitTrainerStates() { WriteHeader(Changed::kFacts); }
  // The shards are going back to those of an earlier step, and become one more version when they are there.
  void GoBack(int64_t step, const std::vector<std::string>& trainer_states);
  // All is lost, and may come from another node (Restore).
  void Lose();
  void Restore(int64_t step, uint64_t version, std::vector<int64_t> step_counts,
               std::vector<std::string> trainer_states, uint64_t generation = 0);
  // How often Lose or Restore were called: a state that has come may have the number of the one before, and other bits.
  int64_t states_that_came() const { return states_that_came_; }
  // Lose has dropped a version, and nothing has come since.
  bool had_parameters() const { return had_parameters_; }
  // Counts that are loaded with the values of parameters, or put back where those are not committed. By parameter.
  void SetStepCount(int param, int64_t count) { OwnStepCounts()[static_cast<size_t>(param)] = count; }
  void SetStepCounts(std::vector<int64_t> counts);

 private:
  // What the log is told: epoch and version alone, a step that the journal has, or anything.
  enum class Changed { kEpoch, kStep, kFacts };
  // `of`: what else of the version the parts hear first; null: nothing.
  void CommitVersion(void (JobPart::*of)(), Changed what);
  void WriteHeader(Changed what);
  absl::Status WriteLog(Changed what);
  absl::Status LogFacts(const SnapshotOf& of, const std::vector<std::string>& trainer_states, WhatCounts counts);
  void LogSnapshot(const SnapshotOf& of, const std::vector<std::string>& trainer_states, WhatCounts counts);
  std::vector<int64_t>& OwnStepCounts();

  const std::string job_;
  const std::unique_ptr<Journal> journal_;
  std::unique_ptr<TakeUpLog> log_;
  bool shards_count_ = true;  // for the log, where a version is committed
  std::optional<bool> second_snapshot_;
  bool custody_ended_ = false;
  bool logs_ = false;         // there is a log, and the job is not closed
  JobPart* parts_ = nullptr;  // null: nobody hears
  uint64_t epoch_ = 1;
  uint64_t version_ = 0;
  uint64_t generation_ = 0;
  uint64_t next_generation_ = 0;
  int64_t states_that_came_ = 0;
  int64_t step_ = 0;
  std::shared_ptr<std::vector<int64_t>> step_counts_;
  mutable bool step_counts_are_shared_ = false;
  std::vector<std::string> trainer_states_;
  bool had_parameters_ = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_STEP_COMMITTED_H_
