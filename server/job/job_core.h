#ifndef SHARDD_SERVER_JOB_JOB_CORE_H_
#define SHARDD_SERVER_JOB_JOB_CORE_H_

// One job's state machines: membership and epochs, unshard and reshard, pairing of gradients by name, the step.
//
// Everything since the last commit belongs to the running step and is dropped as one when the epoch advances (Abort):
// that is the only way back, whatever went wrong, and every rank then attaches anew. The only thing that is never
// dropped is a decided step: it is journaled, applied and committed first, and an abort that arrives meanwhile waits
// for it.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/plan/extend.h"
#include "common/plan/plan.h"
#include "server/job/advance.h"
#include "server/job/command_intake.h"
#include "server/job/epoch_end.h"
#include "server/job/full_params/summons.h"
#include "server/job/gradients/gradients.h"
#include "server/job/job_events.h"
#include "server/job/job_identity.h"
#include "server/job/job_part.h"
#include "server/job/job_view.h"
#include "server/job/membership/absent_ranks.h"
#include "server/job/membership/extensions.h"
#include "server/job/membership/gradient_renewal.h"
#include "server/job/membership/leavers.h"
#include "server/job/membership/sessions.h"
#include "server/job/memory_account.h"
#include "server/job/meter/job_meter.h"
#include "server/job/nodes/job_nodes.h"
#include "server/job/step/commits.h"
#include "server/job/step/committed.h"
#include "server/job/trace/job_trace.h"
#include "server/job/unshard/unsharding.h"
#include "server/job/work/device_waits.h"
#include "server/job/work/job_devices.h"
#include "server/job/work/job_work.h"
#include "server/job/writes/pass_commits.h"
#include "server/job/writes/snapshot_keeper.h"
#include "server/job/writes/trainer_writes.h"
#include "server/job/writes/value_writes.h"
#include "server/storage/job_memory.h"
#include "server/tenant/tenant.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

class Journal;
class Session;
class SessionStream;
class TurnQueue;
class WorkTrace;
struct AskedCalls;

// Loop-confined. Shared: device work in flight keeps the job, and so its slabs, alive.
class JobCore final : public std::enable_shared_from_this<JobCore>, private JobControl {
 public:
  struct Init {
    uint64_t id = 0;
    Tenant owner;
    v1::JobSpec spec;
    std::shared_ptr<const ShardPlan> plan;
    std::unique_ptr<JobMemory> memory;
    std::unique_ptr<Journal> journal;
    std::unique_ptr<TakeUpLog> take_up_log;  // null: the job ends with its daemon
    v1::KeptFormats kept_formats;            // with take_up_log
    std::vector<PastProcess> former;         // of the daemon before, which may write what they have mapped
    std::vector<PastProcess> living;         // of the daemon before, which attach again
    JobDevices::Parts devices;
    std::shared_ptr<WorkTrace> work_trace;  // of devices.own; null: work on devices is not traced
    CoreLoop* loop = nullptr;
    TurnQueue* copier = nullptr;  // brings values to the slabs, and waits for their devices
    EventLog* events = nullptr;
    std::function<int64_t()> reserved_by_all;  // the sum of what all jobs have reserved; null: this is the only one
    CommittedFacts committed;                  // of the job whose place it takes; at first: nothing
    std::optional<v1::LostJob> lost;           // what one of this name had, which was not kept
    std::unique_ptr<NodeParts> nodes;          // several nodes; else null
  };
  explicit JobCore(Init init);
  ~JobCore();
  // Hears of the other nodes from here on. To be called once, on the loop.
  void StartNodes() { nodes_.Start(); }

  // Membership -------------------------------------------------------------------------------------
  // (rank_sessions.cc, lost_ranks.cc)
  const JobIdentity& identity() const { return identity_; }
  const std::string& name() const { return identity_.name(); }
  const std::shared_ptr<const ShardPlan>& plan() const { return identity_.plan; }
  const JobMemory& memory() const { return *memory_; }
  const Committed& committed() const { return committed_; }
  const Sessions& sessions() const { return sessions_; }
  const JobDevices& devices() const { return devices_; }
  const JobNodes& nodes() const { return nodes_; }
  // What others see of it.
  const JobView& view() const { return view_; }
  const MemoryAccount& memory_account() const { return memory_account_; }
  bool closed() const { return end_.closed(); }

  // Takes the session, or leaves it to the caller with an error, who frees it elsewhere than on the loop. ABORTED: the
  // epoch went on while the session was being made. REQUIRES: the rank has no session.
  absl::Status AddSession(std::unique_ptr<Session>&& session);
  // The end of the process becomes the session's, if that is not so already. `pidfd` may be invalid.
  void WatchProcess(Session* session, UniqueFd pidfd);
  // The client is there (its stream said hello).
  void SessionLive(Session* session, std::shared_ptr<SessionStream> stream);
  void Detach(int rank, bool finished);
  // ABORTED: not yet, the attach has to come again; before memory is made for a session, and when it is there.
  // `process`: its pidfd, where there is one.
  absl::Status CheckMayAttach(int rank, int32_t pid, bool replace, const UniqueFd& process = UniqueFd());
  const DeviceWaits& waits() const { return waits_; }
  // The rank is gone without a word. Its session stays while a commit is under way, and where it has finished and the
  // others need its gradients; unless it is `replaced`, which gives the step up.
  void SessionLost(int rank, const std::string& why, bool replaced = false);
  // As AbsentRanks::Answered. Ranks that wait in vain are told.
  void RankAnswered(int rank, const absl::Status& status, uint64_t ticks);
  // Ends all sessions and frees the memory as soon as device work in flight has ended. Of several nodes: here, where
  // the others wait for another daemon or job to take this one's place, or on all of them. A job that is cut over nodes
  // ends everywhere with each of its parts, unless the part goes on with the next daemon of its node.
  // kReplaced: another job of this daemon has taken its place.
  enum class CloseOn { kThisDaemon, kThisNode, kAllNodes, kReplaced };
  void Close(const std::string& why, CloseOn on);
  void Close(const std::string& why) override { Close(why, CloseOn::kThisNode); }
  // The epoch advances; see the top.
  void Abort(absl::Status cause, std::vector<int> lost_ranks) { EndEpoch({std::move(cause), std::move(lost_ranks)}); }
  // The epoch advances where that costs nothing: behind the next step, on all nodes. False: with what this job does no
  // end costs nothing.
  bool EndBehindStep(const absl::Status& cause);
  // ... or now, if all ranks have been doing nothing for `quiet`, and are in no step.
  void EndIfIdle(const absl::Status& cause, absl::Duration quiet);

  // Does whatever may happen next, until nothing may: at the end of every event on the loop. (advance.cc)
  void Advance() override;
  static absl::Span<const Transition> Transitions();

  // Looks at what devices and rings say, and takes no new command after `until`; true if there was anything.
  bool PollRings(absl::Time until = absl::InfiniteFuture());
  // What comes by streams.
  CommandIntake& commands() { return commands_; }
  // As Gradients::GivenByOthers.
  std::vector<int> GivenByOthers(const Session& session, uint64_t since) {
    return gradients_.GivenByOthers(session, since);
  }
  // Deadlines: ranks that others wait for and that send nothing.
  void CheckSilence(absl::Time now);

  // More to train (job_extend.cc). The rank asks that another job take this one's place, as `extension` says. `done`
  // runs once, on the loop; with OK when that has happened. When all ranks have asked for the same, `build` is called
  // with all of `done`, and `extensions` are building until its epoch ends or they are given up (TakeAll).
  void AwaitExtension(Session* session, std::shared_ptr<const Extension> extension, Extensions::Done done,
                      Extensions::Build build);
  Extensions& extensions() { return extensions_; }
  // Over several nodes: what was built is this node's part, and `take` makes it the job when all nodes have theirs.
  void ExtensionBuilt(const Extension& extension, Extensions::TakeItsPlace take);
  // The node `as` trains more already: the epoch ends, and `build` is called when nothing of it is left; again and
  // again where it could not be built (Extensions::PutOffWidening).
  void Widen(std::shared_ptr<const Extension> extension, int as, Extensions::Build build);
  CommittedFacts committed_facts() const;  // as its successor begins

  // The job is over: no daemon takes it up.
  void EndCustody() {
    committed_.EndCustody();
    memory_->EndCustody();
  }

  JobTrace& trace() { return trace_; }

 private:
  void Fail(absl::Status cause) override { Abort(std::move(cause), {}); }
  std::shared_ptr<void> Keep() override { return shared_from_this(); }
  int world_size() const { return plan()->world_size; }
  void EndEpoch(EpochEnd::Pending end);
  bool NodesExtend(bool made);  // as JobNodes::Results::extend
  bool EndsBeforePass() const;
  bool MayEndBeforePass() const;
  bool MayTellOfPass() const;
  bool AwaitEndBehindStep(const absl::Status& cause);
  void EndDetached(int rank, bool finished);
  void EndSession(int rank);
  void Remember(const v1::StepRecord& times);  // the step that was committed
  // Commands. Each returns an error only for what the client must not do, which ends the epoch (CommandIntake).
  absl::Status Execute(Session* session, RankCommand command);
  absl::Status Dispatch(Session* session, RankCommand command);

  uint32_t SeeFacts() const;  // (advance.cc)
  AskedCalls asked_calls() const;
  Wait WaitingFor(int rank) const;  // for whom and for what it cannot go on

  // Constant after construction.
  const JobIdentity identity_;
  const std::unique_ptr<JobMemory> memory_;
  JobDevices devices_;  // constant, until the end

  // Loop-confined. Committed:
  Committed committed_;
  JobEvents events_;
  JobWork work_;
  DeviceWaits waits_;
  // Membership:
  EpochEnd end_;
  Sessions sessions_;
  CommandIntake commands_;
  Commits commits_;
  Gradients gradients_;
  // Values, and the full parameters that they are written back to:
  ValueWrites values_;
  Summons summons_;
  AbsentRanks absent_;
  SnapshotKeeper snapshots_;
  TrainerWrites writes_;
  PassCommits pass_commits_;
  Leavers leavers_;
  GradientRenewal renewal_;
  Extensions extensions_;
  bool advancing_ = false;
  // The running step:
  Unsharding unsharding_;
  JobNodes nodes_;
  v1::Counters counters_;
  MemoryAccount memory_account_;
  const JobView view_;
  JobTrace trace_;
  JobMeter meter_;
  JobParts parts_;
};

// Of the plan alone (plan_status.cc); any thread.
void DescribeGroups(const ShardPlan& plan, v1::ListGroupsResponse* out);
void DescribeParameters(const ShardPlan& plan, v1::ListParametersResponse* out);
void DescribeTraced(const ShardPlan& plan, v1::TraceStart* out);  // groups

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_JOB_CORE_H_
