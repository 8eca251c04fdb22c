#ifndef SHARDD_SERVER_JOB_JOB_CORE_H_
#define SHARDD_SERVER_JOB_JOB_CORE_H_

// One job's state machines: membership and epochs, unshard and reshard, pairing of gradients by name, the step.
//
// Everything since the last commit belongs to the running step and is dropped as one when the epoch advances (Abort):
// that is the only way back, whatever went wrong, and every rank then attaches anew. The only thing that is never
// dropped is a decided step: it is journaled, applied and committed first, and an abort that arrives meanwhile waits
// for it.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/plan/extend.h"
#include "common/plan/plan.h"
#include "server/collective/collective.h"
#include "server/collective/nodes/node_collective.h"
#include "server/collective/trainers/trainer_collective.h"
#include "server/job/advance.h"
#include "server/job/full_params/summons.h"
#include "server/job/gradients/gradients.h"
#include "server/job/job_events.h"
#include "server/job/job_extend.h"
#include "server/job/job_part.h"
#include "server/job/membership/absent_ranks.h"
#include "server/job/membership/extensions.h"
#include "server/job/membership/gradient_renewal.h"
#include "server/job/membership/leavers.h"
#include "server/job/membership/sessions.h"
#include "server/job/memory_account.h"
#include "server/job/step/commits.h"
#include "server/job/step/committed.h"
#include "server/job/trace/job_trace.h"
#include "server/job/unshard/node_gathers.h"
#include "server/job/unshard/unsharding.h"
#include "server/job/work/device_waits.h"
#include "server/job/work/job_work.h"
#include "server/job/work/optimizer_devices.h"
#include "server/job/writes/pass_commits.h"
#include "server/job/writes/snapshot_keeper.h"
#include "server/job/writes/trainer_writes.h"
#include "server/job/writes/value_writes.h"
#include "server/loop/core_loop.h"
#include "server/multinode/given_gradients.h"
#include "server/multinode/job_nodes.h"
#include "server/observe/events.h"
#include "server/session/session.h"
#include "server/storage/job_memory.h"
#include "server/storage/journal.h"
#include "server/tenant/tenant.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// What a job's description says that grows with its model (plan_status.cc). Any thread.
struct JobDescription {
  std::shared_ptr<const ShardPlan> plan;
  std::shared_ptr<const std::vector<int64_t>> step_counts;  // by parameter

  void Complete(v1::Job* out) const;
};

// Loop-confined. Shared: device work in flight keeps the job, and so its slabs, alive.
class JobCore : public std::enable_shared_from_this<JobCore>, private NodeJob, private JobPart {
 public:
  struct Init {
    uint64_t id = 0;
    Tenant owner;
    v1::JobSpec spec;
    std::shared_ptr<const ShardPlan> plan;
    std::unique_ptr<JobMemory> memory;
    std::unique_ptr<Journal> journal;
    std::vector<Device*> devices;            // by rank; outlive the job, or are its own_devices
    std::vector<Device*> optimizer_devices;  // likewise, as OptimizerDevices takes them; empty: `devices`
    std::vector<std::unique_ptr<Device>> own_devices;
    std::shared_ptr<WorkTrace> work_trace;  // of own_devices; null: work on devices is not traced
    std::unique_ptr<Collective> collective;
    CoreLoop* loop = nullptr;
    TurnQueue* copier = nullptr;              // brings values to the slabs, and waits for their devices
    std::unique_ptr<CoreLoop> memory_worker;  // makes and frees what holds much memory, but for the slabs
    EventLog* events = nullptr;
    std::function<int64_t()> reserved_by_all;  // the sum of what all jobs have reserved; null: this is the only one
    CommittedFacts committed;                  // of the job whose place it takes; at first: nothing
    std::optional<v1::LostJob> lost;           // what one of this name had, which was not kept
    // Several nodes (job_nodes.cc); else null.
    using Nodes = NodeParts;
    std::unique_ptr<Nodes> nodes;
  };
  explicit JobCore(Init init);
  ~JobCore() override;
  // Several nodes: hears of the others from here on. To be called once, on the loop.
  void StartNodes();

  // Membership -------------------------------------------------------------------------------------
  // (job_membership.cc)
  uint64_t id() const { return id_; }
  const Tenant& owner() const { return owner_; }
  const std::string& name() const { return spec_.name(); }
  const v1::JobSpec& spec() const { return spec_; }
  const std::shared_ptr<const ShardPlan>& plan() const { return plan_; }
  const JobMemory& memory() const { return *memory_; }
  uint64_t epoch() const { return committed_.epoch(); }
  uint64_t version() const { return committed_.version(); }
  // Also while what it had is brought from another node: ranks that live come back to it.
  bool has_parameters() const {
    return committed_.version() > 0 || (committed_.had_parameters() && nodes_->member().fetching());
  }
  // The last step that ranks may know of: on several nodes, that all of them hold.
  int64_t committed_step() const {
    return nodes_ == nullptr ? committed_.step() : std::min(committed_.step(), nodes_->member().held_step());
  }
  const std::string& trainer_state(int rank) const { return committed_.trainer_states()[rank]; }
  Session* session(int rank) const { return sessions_[rank].get(); }
  const Sessions& sessions() const { return sessions_; }
  const std::vector<Device*>& devices() const { return devices_; }  // by rank
  int node() const { return nodes_ == nullptr ? 0 : nodes_->member().node(); }
  const MemoryAccount& memory_account() const { return memory_account_; }
  // Every rank has said that it needs the job no more; where parameters are cut over nodes, of all nodes, which are
  // given what they need of this one until then.
  bool finished() const;
  // Its own ranks have finished, and other nodes need what this one holds.
  bool ServesOthers() const { return node_gathers_ != nullptr && leavers_.all_finished() && !finished(); }
  bool closed() const { return closed_; }

  // Where sessions are made, and what they leave is freed: in this order, so a session that is made has the memory of
  // the one before. Both take as long as their memory is large, and keep no other job from its own.
  CoreLoop* memory_worker() const { return memory_worker_.get(); }
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
  // OpenJob or AttachRank of `rank` (-1: it did not say) came to `status` at `ticks` (TicksSinceBoot). Where no retry
  // would help, ranks that wait for it are told. (job_absent.cc)
  void RankAnswered(int rank, const absl::Status& status, uint64_t ticks);
  // Ends all sessions and frees the memory as soon as device work in flight has ended. Of several nodes: here, where
  // the others wait for another daemon or job to take this one's place, or on all of them.
  enum class CloseOn { kThisNode, kAllNodes };
  void Close(const std::string& why, CloseOn on = CloseOn::kThisNode);
  // The epoch advances; see the top.
  void Abort(absl::Status cause, std::vector<int> lost_ranks);

  // Does whatever may happen next, until nothing may: at the end of every event on the loop. (advance.cc)
  void Advance() override;
  static absl::Span<const Transition> Transitions();

  // Takes commands from all rings, no new one after `until`; true if there were any.
  bool PollRings(absl::Time until = absl::InfiniteFuture());
  // Executes commands of the batch from number `first` on, at least one and no new one after `until`. Returns the
  // number of the one to go on with; behind the last where the batch is done or the session is.
  int ExecuteFromStream(Session* session, const v1::CommandBatch& batch, int first = 0,
                        absl::Time until = absl::InfiniteFuture());
  // Deadlines: ranks that others wait for and that send nothing.
  void CheckSilence(absl::Time now);

  // More to train (job_extend.cc). The rank asks that another job take this one's place, as `extension` says. `done`
  // runs once, on the loop; with OK when that has happened. When all ranks have asked for the same, `build` is called
  // with all of `done`, and the job is `extending` until its epoch ends or GiveUpExtension.
  using ExtendDone = Extensions::Done;
  using BuildExtended = Extensions::Build;
  void AwaitExtension(Session* session, std::shared_ptr<const Extension> extension, ExtendDone done,
                      BuildExtended build);
  bool extending() const { return extensions_.building(); }
  void GiveUpExtension() { (void)extensions_.TakeAll(); }
  CommittedFacts committed_facts() const;  // as its successor begins

  // Traces (job_traced.cc). The request is within the limits of the rpc, whoever asks may see the job; the sink was
  // prepared with DescribeTraced.
  void Trace(const v1::TraceJobRequest& request, std::shared_ptr<TraceSink> sink);

  // Snapshots ------------------------------------------------------------------------------------ (job_status.cc)
  // What does not grow with the model; the rest is JobDescription's.
  [[nodiscard]] JobDescription Describe(v1::Job* out);
  void DescribeRanks(v1::ListRanksResponse* out) const;

 private:
  int world_size() const { return plan_->world_size; }
  // Several nodes (job_nodes.cc). NodeJob:
  int64_t NodeStep() const override { return committed_.step() + (commits_.decision().decided() ? 1 : 0); }
  bool NodeInitialized() const override { return committed_.version() > 0 || commits_.decision().committing(); }
  void NodeGo(const v1::PeerMessage::Go& go) override;
  void NodesClosed(int backwards) override;
  void NodesReduced(const std::vector<v1::PeerMessage::Reduced>& reduced) override;
  void NodeDecided(const v1::PeerMessage::Decided& decided) override;
  void NodeValuesAgreed() override;
  void NodeHeld() override {}  // "show the step" asks
  void NodeAbort(const absl::Status& cause) override;
  void NodeGeneration(uint64_t generation) override;
  void NodeIsUp() override;  // (job_gather.cc)
  void NodeClose(const std::string& why) override;
  void NodeSendState(int node, uint64_t transfer) override;  // (job_restore.cc)
  void NodeStopSending(int node) override;
  void NodeBeginFetch(int from, uint64_t transfer) override;
  void SendWaitedState();
  void NodeTakeState(const v1::PeerMessage::State& state) override;
  void NodeTakeRankState(const v1::PeerMessage::RankState& state) override;
  StateSlabs SlabsOfState() const;
  bool MayFinishRestore() const;
  void FinishRestore();
  int ClosedToSay() const;
  void SayClosed();
  void CompareReplicasIfDue();
  void SayDecided();
  // All ranks have asked for it: over nodes, says the values, and NodeValuesAgreed comes when all have the same.
  void CommitValues();
  // Any thread, while nobody writes them.
  absl::Status ReadValues(const std::vector<int64_t>& step_counts, v1::PeerMessage::Values* values) const;
  bool promised() const { return nodes_ != nullptr && nodes_->promised(); }
  // Parameters cut over nodes (job_gather.cc).
  absl::Status CheckUnreached(absl::Time now);
  void SayFinished();
  void SetReadable(uint64_t version);
  void EndDetached(int rank, bool finished);
  void EndSession(int rank);
  // Commands. Each returns an error only for what the client must not do; the caller then aborts the epoch.
  absl::Status Execute(Session* session, RankCommand command);
  absl::Status Dispatch(Session* session, RankCommand command);
  absl::Status OnLeaveFullParams(Session* session, uint64_t done);
  // What the job keeps of the running step itself.
  void StepCommitted() override;
  void VersionCommitted() override { SetReadable(committed_.version()); }
  absl::Status CheckMayBegin(const std::string& what) override;
  void EndEpoch() override;
  void PollTraceLater();

  uint32_t SeeFacts() const;             // (advance.cc)
  Wait WaitingFor(int rank) const;       // for whom and for what it cannot go on
  std::string WaitText(int rank) const;  // (job_status.cc) empty: it is its own turn
  void TellWaiting(Session* session, absl::Time now);
  // Ranks without a session (job_absent.cc).
  absl::Status CheckStillHas(const Session& session) const;
  void CheckAbsent();
  bool SomeWaitInVain() const;
  absl::Status RefusedError() const;
  bool IsMidStep() const;  // the end of the epoch drops something that a rank has begun
  v1::JobState State() const;

  // Constant after construction.
  const uint64_t id_;
  const Tenant owner_;
  const v1::JobSpec spec_;
  const std::shared_ptr<const ShardPlan> plan_;
  const std::unique_ptr<JobMemory> memory_;
  std::vector<std::unique_ptr<Device>> own_devices_;
  const std::vector<Device*> devices_;
  const OptimizerDevices optimizer_devices_;
  std::unique_ptr<Collective> collective_;  // constant, until the end
  CoreLoop* const loop_;
  std::unique_ptr<CoreLoop> memory_worker_;  // these two are constant until the end
  const absl::Time created_;
  const std::optional<v1::LostJob> lost_;  // what one of this name had before

  // Loop-confined. Committed:
  Committed committed_;
  JobEvents events_;
  JobWork work_;
  DeviceWaits waits_;
  // Membership:
  Sessions sessions_;
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
  int next_polled_ = 0;  // the rank whose ring is looked at first
  bool closed_ = false;
  bool advancing_ = false;
  std::optional<std::pair<absl::Status, std::vector<int>>> pending_abort_;  // waits for a commit under way
  // The running step:
  Unsharding unsharding_;
  std::unique_ptr<JobNodes> nodes_;            // several nodes; else null
  std::unique_ptr<NodeGathers> node_gathers_;  // null: nothing is cut over nodes
  bool finished_said_ = false;                 // that all ranks have, to other nodes
  v1::Counters counters_;
  MemoryAccount memory_account_;
  JobTrace trace_;
  JobParts parts_;
};

// Of the plan alone (plan_status.cc); any thread.
void DescribeGroups(const ShardPlan& plan, v1::ListGroupsResponse* out);
void DescribeParameters(const ShardPlan& plan, v1::ListParametersResponse* out);
void DescribeTraced(const ShardPlan& plan, v1::TraceStart* out);  // groups (job_traced.cc)

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_JOB_CORE_H_
