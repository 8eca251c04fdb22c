#ifndef SHARDD_SERVER_JOB_WRITES_VALUE_WRITES_H_
#define SHARDD_SERVER_JOB_WRITES_VALUE_WRITES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/plan/plan.h"
#include "server/job/job_part.h"
#include "server/job/writes/initial_values.h"
#include "server/job/writes/parameter_parts.h"
#include "server/job/writes/value_commit.h"
#include "server/job/writes/value_copies.h"
#include "server/job/writes/write_undo.h"
#include "shardd/v1/journal.pb.h"

namespace shardd {

class Commits;
class Committed;
class Extensions;
class GradientPresence;
class JobEvents;
class JobMemory;
class JobSlab;
class JobWork;
struct RankCommand;
class Session;
class Sessions;
class SnapshotKeeper;
class StepDecision;
class Summons;
class TurnQueue;
struct WriteRequest;

// Values from trainers: initial ones, writeback of full parameters, and with them the state of the daemon's optimizer.
// Nothing of it is in a version before every rank has sent CommitParameters; until then it can be undone.
//
// Owns who wrote what and who asked for the commit, and the copies that bring values to the slabs.
// Loop-confined; copies run on the copier, and hold the session that asked for one until it has ended: its commands
// wait in its ring, in their order, and everybody else goes on.
class ValueWrites final : public JobPart {
 public:
  struct Facts {
    const ShardPlan* plan = nullptr;
    const StepDecision* decision = nullptr;
    const Summons* summons = nullptr;
    const Extensions* extensions = nullptr;
    const Sessions* sessions = nullptr;
  };
  struct Services {
    JobMemory* memory = nullptr;
    Committed* counts = nullptr;           // whose counts of updates are loaded with values
    GradientPresence* presence = nullptr;  // of gradients, which are written with values
    Commits* commits = nullptr;
    JobEvents* events = nullptr;
    JobWork* work = nullptr;
    JobControl* job = nullptr;
    std::function<void()> taken_back = nullptr;  // Undo is done; null: nobody hears
    const SnapshotKeeper* snapshots = nullptr;   // where it is kept before it is committed; null: it is not
  };
  // All of both outlive this. `copier`, `owner`: as of ValueCopies.
  ValueWrites(Facts facts, Services services, TurnQueue* copier, WorkOwner owner);

  // The daemon before has promised values of the next version, which lie in the slabs: Commit or Undo follows. Before
  // anything else.
  void TakeUp(const v1::PromisedValuesRecord& promised);

  const ValueCommit& commit() const { return commit_; }
  const WriteUndo& undo() const { return undo_; }
  WriteUndo& undo() { return undo_; }
  // Values are written that no version has.
  bool any_initial() const { return initial_.any(); }
  // By parameter, a bit for each of its parts (WriteRequest::part) that ranks have written since the last version, also
  // where that was nothing of what this node holds.
  const std::vector<uint32_t>& written_parts() const { return written_parts_; }
  // Parts of initial values of an epoch that was given up: to be cleared.
  std::vector<SlabPart> StaleParts() const;

  // Commands. A method that returns an error leaves it to the caller to end the epoch.
  absl::Status Write(Session* session, const RankCommand& command);
  absl::Status AskForCommit(int rank);

  // Takes back what was written since the last commit. undo().undoing() until the copier has done it, and sessions are
  // held.
  void Undo();
  // Makes what was written a version. REQUIRES: all ranks have asked; over several nodes, and all nodes have the same.
  void Commit();
  // Over several nodes, this one's values are read and said to the others.
  void BeginSaying() { commit_.BeginSaying(); }
  void EndReading() { commit_.EndReading(); }
  // All slabs are about to be written by another node, and then are.
  void BeginRestore();
  void Restored() { initial_.Committed(); }

  // Runs `closure` on the copier, behind all copies that were asked for.
  void Behind(absl::AnyInvocable<void()> closure) { copies_.Behind(std::move(closure)); }
  // Runs `then` on the loop when the copier is done with the undo: at once, unless it is forgetting what a commit
  // before has made void.
  void WhenUndoIsIdle(ValueCopies::Then then);
  bool IsStuck(absl::Time now) const { return copies_.IsStuck(now); }
  // Also where the rank leaves full parameters.
  void Forget(int rank) override { commit_.Forget(rank); }
  absl::Status CheckMayBegin(const std::string& what) override;
  void ValuesCommitted() override { commit_.Committed(); }
  void EndEpoch() override;

 private:
  struct Copying {
    const JobSlab* slab = nullptr;
    int64_t size_bytes = 0;  // that it writes, at most
    bool of_gradient = false;
  };
  absl::Status CheckMayWrite(int rank, const RankCommand& command, const std::string& what, bool writeback) const;
  // What is written: in the session's staging, or what came with the command. `memory` keeps it there.
  struct Source {
    const char* data = nullptr;
    std::shared_ptr<const void> memory;
  };
  absl::StatusOr<Source> SourceOf(Session* session, const RankCommand& command, const WriteRequest& request,
                                  const std::string& what) const;
  absl::Status WriteGradient(Session* session, const WriteRequest& request, Source source);
  absl::Status WritePart(Session* session, const WriteRequest& request, Source source);
  // One of few bytes has ended when this returns. An error of one that ends later ends the epoch.
  absl::Status CopyFor(Session* session, const Copying& copying, ValueCopies::Copy copy);
  void Run(ValueCopies::Copy copy, ValueCopies::Then then);
  void ForgetOldBytes();  // REQUIRES: there is room for some
  void Release(Session* session);
  bool WritesBack(int rank) const;
  // What was written stays from here on. `then` runs once what is stale is cleared, at once where there is nothing.
  void ClearStale(ValueCopies::Then then);
  void SubmitCommit(bool forgets);
  absl::Status Error(absl::StatusCode code, int rank, absl::string_view what, absl::string_view fact) const;

  const Facts see_;
  const Services use_;
  ValueCommit commit_;
  InitialValues initial_;
  WriteUndo undo_;
  ValueCopies copies_;
  std::vector<bool> written_gradients_;  // by parameter
  std::vector<uint32_t> written_parts_;
  std::vector<std::string> promised_states_;  // of trainers, by rank, of the daemon before; empty: as committed
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_VALUE_WRITES_H_
