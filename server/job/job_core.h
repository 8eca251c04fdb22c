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
#include "common/plan/extend.h"
#include "common/plan/plan.h"
#include "common/tensor/norm.h"
#include "server/collective/collective.h"
#include "server/collective/nodes/node_collective.h"
#include "server/collective/nodes/node_gather.h"
#include "server/collective/trainers/trainer_collective.h"
#include "server/job/given_back.h"
#include "server/job/job_extend.h"
#include "server/job/membership/absent_ranks.h"
#include "server/job/membership/past_process.h"
#include "server/job/optimizer_devices.h"
#include "server/job/step_state.h"
#include "server/job/trace/job_trace.h"
#include "server/loop/core_loop.h"
#include "server/multinode/node_events.h"
#include "server/multinode/node_member.h"
#include "server/multinode/node_restore.h"
#include "server/observe/events.h"
#include "server/schedule/order.h"
#include "server/schedule/unshard_pool.h"
#include "server/session/session.h"
#include "server/storage/job_memory.h"
#include "server/storage/journal.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// Loop-confined. Shared: device work in flight keeps the job, and so its slabs, alive.
class JobCore : public std::enable_shared_from_this<JobCore>, private NodeJob {
 public:
  struct Init {
    uint64_t id = 0;
    uint32_t uid = 0;
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
    CoreLoop* copier = nullptr;               // brings values to the slabs, and waits for their devices
    std::unique_ptr<CoreLoop> memory_worker;  // makes and frees what holds much memory, but for the slabs
    EventLog* events = nullptr;
    std::function<int64_t()> reserved_by_all;  // the sum of reserved_bytes() of all jobs; null: this is the only one
    CommittedFacts committed;                  // of the job whose place it takes; at first: nothing
    std::optional<v1::LostJob> lost;           // what one of this name had, which was not kept
    // Several nodes (job_nodes.cc); else null.
    struct Nodes {
      int node = 0;
      std::shared_ptr<NodeEvents> events;
      std::unique_ptr<PeerLinks> links;      // of `events`; used by the exchange of `collective`
      NodeCollective* collective = nullptr;  // it is `collective`
      std::unique_ptr<NodeGather> gather;    // where parameters are cut over nodes, else null; uses `links` and slabs
      CoreLoop* worker = nullptr;            // reads initial values
      ~Nodes() {
        if (events != nullptr && links != nullptr) events->ForgetExchange();  // it came to no job
      }
    };
    std::unique_ptr<Nodes> nodes;
  };
  explicit JobCore(Init init);
  ~JobCore() override;
  // Several nodes: hears of the others from here on. To be called once, on the loop.
  void StartNodes();

  // Membership -------------------------------------------------------------------------------------
  // (job_membership.cc)
  uint64_t id() const { return id_; }
  uint32_t uid() const { return uid_; }
  const std::string& name() const { return spec_.name(); }
  const v1::JobSpec& spec() const { return spec_; }
  const std::shared_ptr<const ShardPlan>& plan() const { return plan_; }
  const JobMemory& memory() const { return *memory_; }
  uint64_t epoch() const { return epoch_; }
  uint64_t version() const { return version_; }
  // Also while what it had is brought from another node: ranks that live come back to it.
  bool has_parameters() const { return version_ > 0 || (had_parameters_ && nodes_->fetching()); }
  // The last step that ranks may know of: on several nodes, that all of them hold.
  int64_t committed_step() const {
    return nodes_ == nullptr ? committed_step_ : std::min(committed_step_, nodes_->held_step());
  }
  const std::string& trainer_state(int rank) const { return trainer_states_[rank]; }
  Session* session(int rank) const { return sessions_[rank].get(); }
  Session* FindSession(uint64_t session_id) const;
  const std::string& device_name(int rank) const { return devices_[rank]->name(); }
  DeviceMemory* device_memory(int rank) const { return devices_[rank]->memory(); }
  int attached() const;
  int node() const { return nodes_ == nullptr ? 0 : nodes_->node(); }
  // Promised when the job was opened and allocated only when needed: sessions, the kept copy, the undo of a writeback
  // (on GPUs when one begins), gradients that trainers have given back until the next come.
  int64_t reserved_bytes() const;
  // Every rank has said that it needs the job no more; where parameters are cut over nodes, of all nodes, which are
  // given what they need of this one until then.
  bool finished() const;
  // Its own ranks have finished, and other nodes need what this one holds.
  bool ServesOthers() const { return node_gather_ != nullptr && RanksFinished() && !finished(); }
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
  // A rank that has finished and is kept for its gradients is to be replaced: the step is given up. False: it is not
  // so.
  bool DropHeld(int rank);
  // ABORTED: not yet, the attach has to come again; before memory is made for a session, and when it is there.
  // `process`: its pidfd, where there is one.
  absl::Status CheckMayAttach(int rank, int32_t pid, bool replace, const UniqueFd& process = UniqueFd());
  // ABORTED: sums of a session that the rank has had may still write its part of the gradient shards: until its process
  // has ended or says that they do not. `replace`: a process other than `pid` is killed. (job_sums.cc)
  absl::Status CheckStragglers(int rank, int32_t pid, bool replace);
  // The descriptor of the gradient slots that kFdFirstPeerSlots names.
  absl::StatusOr<int> SlotsOfPeer(FdRange range) const;
  // The rank is gone without a word.
  void SessionLost(int rank, const std::string& why);
  // OpenJob of `rank` (-1: it did not say) came to `status`. Where no retry would help, ranks that wait for it are
  // told. (job_absent.cc)
  void OpenAnswered(int rank, const absl::Status& status);
  // Ends all sessions and frees the memory as soon as device work in flight has ended. Of several nodes: here, where
  // the others wait for another daemon or job to take this one's place, or on all of them.
  enum class CloseOn { kThisNode, kAllNodes };
  void Close(const std::string& why, CloseOn on = CloseOn::kThisNode);
  // The epoch advances; see the top.
  void Abort(absl::Status cause, std::vector<int> lost_ranks);

  // Takes commands from all rings, no new one after `until`; true if there were any.
  bool PollRings(absl::Time until = absl::InfiniteFuture());
  // Executes commands of the batch from number `first` on, at least one and no new one after `until`. Returns the
  // number of the one to go on with; behind the last where the batch is done or the session is.
  int ExecuteFromStream(Session* session, const v1::CommandBatch& batch, int first = 0,
                        absl::Time until = absl::InfiniteFuture());
  void SetAwake(bool awake);
  // Deadlines: ranks that others wait for and that send nothing.
  void CheckSilence(absl::Time now);

  // More to train (job_extend.cc). The rank asks that another job take this one's place, as `extension` says. `done`
  // runs once, on the loop; with OK when that has happened. When all ranks have asked for the same, `build` is called
  // with all of `done`, and the job is `extending` until its epoch ends or GiveUpExtension.
  using ExtendDone = std::function<void(absl::Status)>;
  using BuildExtended = std::function<void(std::shared_ptr<const Extension>, std::vector<ExtendDone>)>;
  void AwaitExtension(Session* session, std::shared_ptr<const Extension> extension, ExtendDone done,
                      BuildExtended build);
  bool extending() const { return extending_; }
  void GiveUpExtension() { (void)TakeExtensions(); }
  CommittedFacts committed_facts() const;  // as its successor begins

  // Traces (job_traced.cc). The request is within the limits of the rpc, whoever asks may see the job; the sink was
  // prepared with DescribeTraced.
  void Trace(const v1::TraceJobRequest& request, std::shared_ptr<TraceSink> sink);

  // Snapshots ------------------------------------------------------------------------------------ (job_status.cc)
  void Describe(v1::Job* out) const;
  void DescribeRanks(v1::ListRanksResponse* out) const;
  void DescribeMemory(v1::Memory* out) const;

 private:
  int world_size() const { return plan_->world_size; }
  // Several nodes (job_nodes.cc). NodeJob:
  int64_t NodeStep() const override { return committed_step_ + (committing_ && deciding_ ? 1 : 0); }
  bool NodeInitialized() const override { return version_ > 0 || committing_; }
  void NodeGo(const v1::PeerMessage::Go& go) override;
  void NodesClosed(int backwards) override;
  void NodesReduced(const std::vector<v1::PeerMessage::Reduced>& reduced) override;
  void NodeDecided(const v1::PeerMessage::Decided& decided) override;
  void NodeValuesAgreed() override;
  void NodeHeld() override;  // (job_commit.cc)
  void NodeAbort(const absl::Status& cause) override;
  void NodeGeneration(uint64_t generation) override;
  void NodeIsUp() override;  // (job_gather.cc)
  void NodeClose(const std::string& why) override;
  void NodeSendState(int node, uint64_t transfer) override;  // (job_restore.cc)
  void NodeStopSending(int node) override;
  void NodeBeginFetch(int from, uint64_t transfer) override;
  void SendWaitedState();
  void AskForState(int from, uint64_t transfer);
  void NodeTakeState(const v1::PeerMessage::State& state) override;
  void NodeTakeRankState(const v1::PeerMessage::RankState& state) override;
  StateSlabs SlabsOfState() const;
  void MaybeFinishRestore();
  // Says to node 0 that the group's next occurrence is complete here; it is added when all nodes have it (NodeGo).
  void SayReady(PairKey key, Pair& pair, const std::vector<int>& ranks);
  void MaybeSayClosed();
  void SayReduced();
  void CompareReplicasIfDue();
  void SayValues();
  // Any thread, while nobody writes them.
  absl::Status ReadValues(const std::vector<int64_t>& step_counts, v1::PeerMessage::Values* values) const;
  bool promised() const { return nodes_ != nullptr && nodes_->promised(); }
  // What has been said to node 0 and not been added.
  bool AwaitsNodes() const;
  // Parameters cut over nodes (job_gather.cc). What other nodes hold of a group that is being unsharded into a slot.
  struct Gathered {
    int group = 0;
    uint64_t version = 0;
    uint64_t epoch = 0;
    char* destination = nullptr;
    std::string label;
    std::function<void(absl::Status)> done;  // any thread
    absl::Time since = MonotonicNow();
  };
  void GatherFromNodes(Gathered gathered);
  void KeepGather(Gathered gathered);
  void GatherAgain();
  void DropGathers();
  absl::Status CheckGathers(absl::Time now) const;
  absl::Status CheckUnreached(absl::Time now);
  // By parameter, where some nodes hold none of it: as those say that do.
  std::string PresentOnHolders(const std::vector<v1::PeerMessage::Reduced>& reduced) const;
  void MaybeSayFinished();
  bool RanksFinished() const;  // of this node
  void SetReadable(uint64_t version);
  // What this node holds of a parameter: elements of it.
  ParamRange HeldOf(int param) const;
  const std::string& group_name(int group) const { return plan_->groups[group].name; }
  void Event(int rank, absl::string_view kind, std::string text);
  absl::Status RankError(absl::StatusCode code, int rank, absl::string_view what, absl::string_view fact) const;
  // A rank that asks for something that needs all ranks would wait for ever.
  // Whom the rank would need for `what`, in the backward if it is one.
  absl::Status CheckNobodyFinished(int rank, absl::string_view what, int backward = kAllBackwards) const;
  bool LeavesInOrder(int rank) const;
  bool OthersNeedGradientsOf(int rank) const;
  // (job_extend.cc)
  struct AskedExtension {
    std::shared_ptr<const Extension> extension;
    ExtendDone done;  // null while it is being built
  };
  absl::Status CheckMayExtend(int rank) const;
  absl::Status CheckNobodyWentOn(int rank, const std::string& what) const;
  absl::Status CheckNobodyExtends(int rank, absl::string_view what, int backward) const;
  std::string AloneText(int rank, const std::string& what) const;
  absl::Status EndAsking(int rank);  // it was interrupted and goes on
  std::map<int, AskedExtension> TakeExtensions();
  static void Answer(const std::map<int, AskedExtension>& extensions, const absl::Status& status);
  void EndFinished();
  void EndFinishedLater();
  void EndSession(int rank);
  void ResetStep();
  // What waits for ranks' devices (job_given_back.cc). Runs `held` when its signals have come and all of its order
  // before it has run: at once where that is so. An error of it that comes later aborts the epoch, whose end drops it.
  absl::Status WhenGivenBack(Held held);
  bool RunGivenBack();
  void DropGivenBack();
  DoneSignal SignalOf(int rank, uint64_t done) const;
  bool HasCome(const DoneSignal& signal) const;
  bool HaveCome(const std::vector<DoneSignal>& signals) const;
  // What trainers add (job_sums.cc).
  bool PollSums();
  void PollSoon();  // until nothing is waited for
  void PollNoMore();
  void SessionHasSums(int rank);
  void SessionHasNoSums(int rank);  // it ends
  absl::Status CheckSums(absl::Time now, int* rank);
  void ForgetStragglers();
  // New gradient shards (job_renew.cc). A process that may still write those of an epoch that has ended.
  struct GradientWriter {
    int rank = 0;
    int32_t pid = 0;
    UniqueFd process;
    absl::Time killed = absl::InfiniteFuture();
  };
  static std::string TextOf(const std::list<GradientWriter>& writers);
  void NoteGradientWriter(const Session& session);
  void ForgetGradientWriters();
  // ABORTED: not yet, the attach has to come again. RESOURCE_EXHAUSTED: not before a process has ended.
  absl::Status CheckGradientWriters(int rank, int32_t pid, const UniqueFd& process, bool replace);
  absl::Status RenewGradients(const std::string& what, const std::string& why);
  // Signals that have not come for too long; *rank: whose.
  absl::Status CheckHeld(absl::Time now, int* rank) const;
  // Runs `closure` on the loop when `count` calls of the returned function were made, with the first error.
  std::function<void(absl::Status)> Join(int count, std::function<void(absl::Status)> on_loop);
  // The same for work that writes gradient shards.
  std::function<void(absl::Status)> JoinGradientWork(int count, std::function<void(absl::Status)> on_loop);

  // Commands. Each returns an error only for what the client must not do; the caller then aborts the epoch.
  absl::Status Execute(Session* session, RankCommand command);
  absl::Status OnUnshard(Session* session, int group, int64_t phase);  // (job_params.cc)
  absl::Status OnReshard(Session* session, int group, uint64_t done);
  absl::Status OnWriteParameters(Session* session, const RankCommand& command);  // (job_values.cc)
  absl::Status OnCommitParameters(Session* session);
  absl::Status OnEnterFullParams(Session* session, const RankCommand& command);  // (job_full_params.cc)
  absl::Status OnLeaveFullParams(Session* session, uint64_t done);
  absl::Status OnSubmitGradients(Session* session, RankCommand command);  // (job_gradients.cc)
  absl::Status OnBackwardDone(Session* session, const RankCommand& command);
  absl::Status OnAbandonBackward(Session* session, uint64_t done);  // (job_abandon.cc)
  void TellAbandon(int rank, int backward, int taken_back, int stays);
  absl::Status OnSetGradientPresence(Session* session, int64_t param, bool present);  // (job_presence.cc)
  absl::Status OnStep(Session* session, RankCommand command);                         // (job_step.cc)
  absl::Status OnEnterPass(Session* session, RankCommand command);                    // (job_windows.cc)
  absl::Status OnLeavePass(Session* session);
  absl::Status OnOpenWindow(Session* session);
  void OnWaitGradientSlot(Session* session, int group);

  absl::Status Observe(Session* session, OrderEntry entry);
  void TellDeparture(int rank, const std::string& fact);
  // POOLED (job_params.cc)
  // False: it has no slot yet, UnshardDeferred is to be asked again when a fill of the rank's pool has ended.
  absl::StatusOr<bool> UnshardIntoPool(int rank, int group);
  // What the rank has asked for and could not be given when it did, as far as it can be now.
  absl::Status UnshardDeferred(int rank);
  void PublishFilled(size_t pool, int slot, int group);
  absl::Status SlotIsFree(size_t pool);
  absl::Status PrefetchNext(int rank, OrderEntry::Kind kind);
  // POOLED: which of pools_ a rank uses.
  size_t PoolNumber(int rank) const { return static_cast<size_t>(rank) % pools_.size(); }
  absl::Status FillSlot(size_t pool, int slot, int group);
  void SubmitFill(size_t pool, int slot, int group);
  int64_t SlotOffsetBytes(size_t pool, int slot) const {
    return plan_->pools[pool].offset_bytes + slot * plan_->pool_slot_bytes;
  }
  absl::Status CheckUndoFits() const;
  absl::Status RefuseFullParams(const absl::Status& why);
  void SayFullParams(int rank, const std::string& present, const absl::Status& status);
  int64_t reserved_undo_bytes() const;
  absl::Status CompareFullParams(int rank, const FullParams& asked) const;
  absl::Status MaybeGrantFullParams();
  void SettleBehindReductions();
  void GrantFullParams();
  absl::Status CheckSummoned(int rank, int param, absl::string_view what) const;
  void FinishParametersCommit();
  // A part of a parameter that ranks may write; where replicas have copies, copy 0 of it, which the commit carries
  // over.
  struct Written {
    const JobSlab* slab = nullptr;
    int64_t offset_bytes = 0;
    int64_t element_bytes = 0;
  };
  Written WrittenPart(const ParamPlan& param, int what) const;
  // Where what this node holds of it begins, and how many elements that are.
  static std::pair<Written, int64_t> HeldPart(Written written, const ParamRange& held) {
    written.offset_bytes += held.first * written.element_bytes;
    return {written, held.numel};
  }
  // Initial values of an attempt that was given up, with how many elements: to be zeroed.
  std::vector<std::pair<Written, int64_t>> StaleValues() const;
  absl::Status CommitValues();
  void SubmitParametersCommit();
  // Copies of values (job_copies.cc): each runs to its end before the next, most on the copier, where they may touch
  // nothing of the job but slabs and `undo_`.
  using CopyValues = std::function<absl::Status()>;
  struct Copying {
    const JobSlab* slab = nullptr;
    int64_t size_bytes = 0;  // that it writes, at most
    bool of_gradient = false;
  };
  // For a command of the session, which is held until the copy has ended; an error that comes then aborts the epoch.
  // One of few bytes has ended when this returns.
  absl::Status CopyFor(Session* session, const Copying& copying, CopyValues copy);
  // `then` runs on the loop.
  void CopyOffLoop(CopyValues copy, std::function<void(absl::Status)> then);
  void Release(Session* session);
  void CopierGoesOn();                             // where copies run: a piece of one begins
  absl::Status CheckCopies(absl::Time now) const;  // one that does not end
  static absl::Status Clear(const Written& written, int64_t numel);
  absl::Status SaveForUndo(const JobSlab* slab, int64_t offset_bytes, int64_t size_bytes);
  absl::Status TakeBack();
  void ForgetUndo();
  void UndoWrites();  // closes the job where a device fails; `undoing_` until the copier has done it

  // Gradients: pairing (job_gradients.cc), adding (job_reduce.cc), what ranks say of them (job_presence.cc)
  Pair& GetPair(PairKey key);
  absl::Status CheckMissing(int rank, PairKey key, const Pair& pair) const;
  // The daemon has come to read the slot; where the rank's device says when the next bytes are in it, the next may
  // come.
  void IssueSlot(int rank, int slot, bool stream_ordered);
  void ReleaseSlot(int rank, int slot, bool stream_ordered);
  std::vector<DoneSignal> SignalsOfReduction(PairKey key, const Pair& pair, const std::vector<int>& ranks) const;
  void DropWhatStays(PairKey key, Pair& pair, const std::vector<int>& ranks, std::vector<bool>* again);
  void BeginAnew(PairKey key, Pair& pair, const std::vector<int>& ranks);
  void FollowHolders(PairKey key, Pair& pair, const std::vector<int>& ranks);
  const std::vector<bool>& GradientHolders(int param);  // by rank (job_presence.cc)
  // What nodes give together, this one included, by index_in_group.
  struct OfOthers {
    std::vector<bool> present;
    std::vector<bool> fresh;
    uint64_t sequence = 0;
  };
  absl::Status ChooseModes(PairKey key, Pair& pair, const std::vector<int>& ranks, const std::vector<bool>& again,
                           const OfOthers* others, std::vector<GradientMode>* modes);
  // What ranks have said of their gradients before backward `backward` has its effect. Returns what is to be done with
  // the gradients before anything else.
  DeviceOps SettlePresence(const std::vector<int>& params, int backward);
  DeviceOps SettleAllPresence();
  void SettleParts(const absl::flat_hash_map<int, std::vector<bool>>& has, DeviceOps* ops) const;
  absl::Status TryReduce(PairKey key);
  void ForgetIfClosed(PairKey key);
  absl::Status IssueReduce(PairKey key, Pair& pair, const std::vector<int>& ranks, const OfOthers* others = nullptr);
  // All that the daemon's devices are told of one reduction.
  struct Reduction {
    int group = 0;
    std::vector<int> ranks;
    std::vector<bool> stream_ordered;  // by `ranks`
    DeviceOps zeros;
    ReduceScatterRequest request;
    std::vector<std::shared_ptr<SessionMemory>> keep;  // slots are read until it is done, whatever happens meanwhile
  };
  void SubmitReduction(Reduction reduction);
  void OnReduced(int group, const std::vector<int>& ranks, const std::vector<bool>& stream_ordered);
  absl::Status MaybeFold();
  void PublishReduced();
  // The step (job_step.cc, job_commit.cc)
  absl::Status MaybeDecide();
  absl::Status CheckBackwardClosed(int rank, absl::string_view what) const;
  absl::Status CloseStep(Session* session);
  absl::Status CompareSteps() const;
  absl::Status CompareOrders();
  void Decide();
  // The norm is there: decides, or says that the step is reduced here.
  void Measured(const Norm& norm);
  void Apply(double norm);
  void ApplyDecided();
  bool MayShow() const;
  void MaybeShow();
  void Commit();
  void CommitUnshown();
  void CountUpdates();
  void EndStep();
  void AfterCommit();

  // Passes and write windows (job_windows.cc)
  bool trainers_write() const { return !plan_->config.trainers_never_write(); }
  absl::Status MaybeBeginPass();
  bool AllEnterPass() const;
  absl::StatusOr<bool> StepComesFirst() const;
  void FinishWindow(bool stepped);
  void BeginPass();
  void MaybeOpenWindows();
  void ReadmitLate();
  bool EndPausedPasses(bool only_look);
  void PollPausesLater();
  absl::Status CheckStuckWindows(absl::Time now) const;
  // The shards have changed since the copy was kept, and moments or counts with them.
  void MarkKeptStale() { kept_age_ = std::max<int>(kept_age_, plan_->config.keep_every()); }
  void NoteWindowCommitted();
  // Passes that read copies (job_passes.cc)
  bool pass_copies() const { return plan_->config.pass_copies(); }
  absl::Status MaybeCopyForPass();
  absl::Status CopyForPass();
  void FinishPassCopies(bool stepped);
  absl::Status MaybeLetStore();
  // The copy to go back to (job_kept.cc)
  void Keep();
  void NoteKept();
  // With pass_copies, if it is due: keeps what is about to be committed, and then calls `commit`, which ends in
  // AfterCommit. Else calls it at once. REQUIRES: committing_.
  void KeepThen(bool due, std::function<void()> commit);
  void CopyKept(bool back, std::function<void(absl::Status)> done);
  void GoBackToKept();
  // ABORTED: it still waits for those that may store.
  absl::Status CheckWriters(int rank, int32_t pid, bool replace);
  bool MaybeCopyBack();
  void CopyBack();
  bool IsKeptForStores();
  void PollTraceLater();

  struct Wait {
    int rank = -1;  // who is waited for; -1: nobody
    std::string call;
  };
  Wait WaitingFor(int rank) const;       // (job_status.cc)
  std::string WaitText(int rank) const;  // empty: it is its own turn
  void TellWaiting(Session* session, absl::Time now);
  // Ranks without a session (job_absent.cc).
  absl::Status CheckStillHas(const Session& session) const;
  void CheckAbsent();
  void MaybeTellRefused();
  bool IsMidStep() const;  // the end of the epoch drops something that a rank has begun
  v1::JobState State() const;

  // Constant after construction.
  const uint64_t id_;
  const uint32_t uid_;
  const v1::JobSpec spec_;
  const std::shared_ptr<const ShardPlan> plan_;
  const std::unique_ptr<JobMemory> memory_;
  const std::unique_ptr<Journal> journal_;
  const std::vector<std::unique_ptr<Device>> own_devices_;
  const std::vector<Device*> devices_;
  const OptimizerDevices optimizer_devices_;
  std::unique_ptr<Collective> collective_;  // constant, until the end
  TrainerCollective* const trainers_;       // it, or null
  CoreLoop* const loop_;
  CoreLoop* const copier_;
  const std::unique_ptr<CoreLoop> memory_worker_;
  NodeCollective* const node_sums_;  // collective_, on several nodes; else null
  CoreLoop* const node_worker_;
  EventLog* const events_;
  const std::function<int64_t()> reserved_by_all_;
  const absl::Time created_;
  const std::optional<v1::LostJob> lost_;  // what one of this name had before
  const float gradient_scale_;
  const bool pooled_;

  // Loop-confined. Committed:
  uint64_t epoch_ = 1;
  uint64_t version_ = 0;
  bool had_parameters_ = false;  // before another node's state began to come
  int64_t committed_step_ = 0;
  std::vector<int64_t> step_counts_;                     // by parameter
  std::vector<std::string> trainer_states_;              // by rank
  std::unique_ptr<const CapturedOrder> captured_order_;  // null until the first step with requests was committed
  // Membership:
  std::vector<std::unique_ptr<Session>> sessions_;  // by rank; of the current epoch
  AbsentRanks absent_;
  // Sessions that have ended with sums under way, which their processes' GPUs may still make.
  struct Straggler {
    int rank = 0;
    PeerCredentials peer;
    UniqueFd pidfd;
    std::shared_ptr<SumChannel> sums;
  };
  std::vector<Straggler> stragglers_;
  std::list<GradientWriter> gradient_writers_;  // of the gradient shards, in epochs that have ended
  std::list<GradientWriter> left_writers_;      // of those before, which nobody else uses; empty: there are none
  std::unique_ptr<JobSlab> left_gradients_;
  bool renewing_gradients_ = false;
  absl::Status renew_failed_;
  int next_polled_ = 0;  // the rank whose ring is looked at first
  bool closed_ = false;
  std::map<int, AskedExtension> extensions_;                                // by rank
  bool extending_ = false;                                                  // all ranks have asked
  std::optional<std::pair<absl::Status, std::vector<int>>> pending_abort_;  // waits for a commit under way
  // The running step:
  std::vector<RankStep> ranks_;
  std::vector<OrderTracker> orders_;                  // by rank
  std::vector<std::vector<OrderEntry>> step_orders_;  // by rank: of the step it has ended
  std::map<PairKey, Pair> pairs_;
  std::vector<bool> present_;  // by parameter: its gradient shard holds a gradient
  bool gradients_seen_ = false;
  absl::flat_hash_map<int, std::vector<bool>> gradient_holders_;  // by parameter that was asked for
  bool presence_said_ = false;                                    // some rank's `said` is not empty
  int departures_told_ = 0;
  int abandons_told_ = 0;
  int pending_reductions_ = 0;
  int gradient_work_ = 0;  // that writes gradient shards and has not ended, of whatever epoch
  int pending_fills_ = 0;
  bool deciding_ = false;
  // Of memory that ranks' devices have not done with; a decision, or an entry, is among them.
  std::list<Held> held_;
  bool decision_held_ = false;
  bool entry_held_ = false;
  int copies_under_way_ = 0;                  // on the copier
  std::atomic<int64_t> copier_moved_ns_ = 0;  // MonotonicNow() of its last piece for this job; 0: it has none
  PollTimer poll_timer_;
  bool poll_watched_ = false;
  // POOLED, by pool, slot and rank: the signal with which it reads no more.
  std::vector<std::vector<std::vector<uint64_t>>> pool_done_;
  bool committing_ = false;  // a decided step or a parameters commit is being applied, or waits to be shown
  bool applied_ = false;     // of a decided step: it waits
  DecidedStep decided_;
  double grad_norm_ = 0;
  double clip_factor_ = 1;
  bool skipped_ = false;
  bool full_params_granted_ = false;
  std::vector<bool> summoned_;  // by parameter, while granted
  // Several nodes. How many backwards of the step all nodes have closed, and this one has said that it has; the node's
  // own measure of the norm.
  std::shared_ptr<NodeEvents> node_events_;
  std::unique_ptr<PeerLinks> node_links_;
  std::unique_ptr<NodeMember> nodes_;
  int nodes_closed_ = 0;
  int said_closed_ = 0;
  Norm own_norm_;
  std::unique_ptr<NodeGather> node_gather_;  // null: nothing is cut over nodes
  uint64_t gather_generation_ = 0;
  absl::Time unreached_since_ = absl::InfiniteFuture();  // some other node
  std::vector<Gathered> next_gathers_;                   // for the next generation, or until all nodes are reached
  bool reading_values_ = false;
  // Replicas: digests of what this node had at a version, and how many are being taken.
  uint64_t compared_version_ = 0;
  std::vector<uint64_t> value_digests_;
  int digests_under_way_ = 0;
  // Nodes that are sent the state behind a commit, and the numbers of their transfers; who sends.
  std::map<int, uint64_t> wait_for_state_;
  std::map<int, std::shared_ptr<StateSender>> senders_;
  absl::Status uneven_gradient_;  // of several nodes: ranks of this one have dropped it and others have not
  // What comes from another node.
  struct Restore {
    int from = 0;
    absl::Time began = MonotonicNow();
    std::shared_ptr<NodeRestore> slabs;
    bool all_slabs = false;
    std::optional<v1::PeerMessage::State> state;
    std::vector<std::string> trainer_states;  // by rank
  };
  std::shared_ptr<Restore> restore_;  // of nodes_->fetching(); else null, or older
  // Windows. What was kept is whole, and of which step, states and how many committed windows ago.
  bool window_open_ = false;  // somebody was let in since the last version
  bool keeping_ = false;
  bool polls_pauses_ = false;
  bool restoring_ = false;
  bool kept_ = false;
  bool kept_with_commit_ = false;  // pass_copies: of the commit that is under way
  // Processes of the epoch that has ended that may still store: their window was open, or the job has pass_copies.
  struct Writer {
    int rank;
    int pid;
    UniqueFd process;
    // It has been answered since: what it asks next it asks knowing that the epoch is over.
    bool told = false;
  };
  std::list<Writer> writers_;
  absl::Time writers_since_ = absl::InfinitePast();
  bool waits_for_writers_ = false;
  // pass_copies: ranks know that their pass begins; its copies are made; they, or ranks that have left full parameters,
  // wait for signals.
  bool pass_issued_ = false;
  bool copied_for_pass_ = false;
  bool pass_held_ = false;
  bool leave_held_ = false;
  int64_t kept_step_ = 0;
  std::vector<std::string> kept_states_;
  int kept_age_ = 0;
  // Before version 1: by parameter and part (WrittenPart), the epoch that wrote it.
  std::map<std::pair<int, int>, uint64_t> initial_writes_;
  // Of writes not yet committed: old counts of updates by parameter; whether there are old bytes, and whether they are
  // being put back.
  std::map<int, int64_t> undo_counts_;
  bool undo_kept_ = false;
  bool undoing_ = false;
  std::vector<bool> written_gradients_;  // by parameter: written back, and not yet carried to the replicas' copies
  std::vector<UnshardPool> pools_;       // POOLED, as ShardPlan::pools; their slots are numbered from 0 in each
  v1::Counters counters_;
  JobTrace trace_;
  // Of copies: old bytes by 64 KiB chunk of a slab; how many, for status.
  std::map<std::pair<const JobSlab*, int64_t>, std::string> undo_;
  std::atomic<int64_t> undo_bytes_ = 0;
};

// Of the plan alone (plan_status.cc); any thread.
void DescribeGroups(const ShardPlan& plan, v1::ListGroupsResponse* out);
void DescribeParameters(const ShardPlan& plan, v1::ListParametersResponse* out);
void DescribeTraced(const ShardPlan& plan, v1::TraceStart* out);  // groups (job_traced.cc)

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_JOB_CORE_H_
