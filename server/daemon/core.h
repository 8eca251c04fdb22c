#ifndef SHARDD_SERVER_DAEMON_CORE_H_
#define SHARDD_SERVER_DAEMON_CORE_H_

// The daemon without its port: all jobs of this node, their devices, the loop that owns their state and the setup
// thread that allocates their memory.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/collective/nodes/node_exchange.h"
#include "server/daemon/early_refusals.h"
#include "server/daemon/freed_jobs.h"
#include "server/daemon/heap_trim.h"
#include "server/daemon/jobs_source.h"
#include "server/daemon/last_epochs.h"
#include "server/daemon/launcher.h"
#include "server/daemon/take_up/job_custody.h"
#include "server/daemon/take_up/take_ups.h"
#include "server/device/devices.h"
#include "server/job/job_core.h"
#include "server/loop/core_loop.h"
#include "server/loop/turn_line.h"
#include "server/observe/events.h"
#include "server/tenant/tenant.h"
#include "server/turns/turn_queue.h"

namespace shardd {

class Collective;
class Device;
class NcclExchange;
class SessionStream;
class TraceSink;
struct NcclExchangeOptions;

struct CoreOptions {
  bool embedded = false;                             // ends (on_idle) after its last job
  absl::Duration embedded_idle = absl::Seconds(60);  // ... or when no job was ever opened for so long
  // How long Shutdown waits for the step that runs in a job that the next daemon goes on with.
  absl::Duration finish_step = absl::Seconds(20);
  int max_jobs_per_uid = 64;
  int64_t max_bytes_per_uid = 0;  // of slabs; 0: no quota
  // On GPUs: threads that compute norms and updates of jobs with offload to the host, together. At least 1.
  int offload_threads = 1;
  std::vector<GpuFacts> gpus;  // with device_warnings: what status says of the devices
  std::vector<std::string> device_warnings;
  // Makes what adds the gradients of a job over these devices, by rank; on the setup thread. Null: copies.
  std::function<std::unique_ptr<Collective>(const std::vector<Device*>& devices)> make_collective;
  bool nccl_by_name = false;  // make_collective was asked for, so the trainers add nothing unless a job says so
  std::string collective;     // for status: what adds gradients between GPUs, and why; empty on CPUs
  // Null: no jobs that span several nodes. Else makes a job's links, on the setup thread; the events outlive them.
  std::function<absl::StatusOr<std::unique_ptr<PeerLinks>>(const PeerJoin&, PeerLinks::Events*)> join_nodes;
  // On GPUs: what adds a job's gradients over its nodes (NcclExchanges::Make).
  std::function<absl::StatusOr<std::unique_ptr<NcclExchange>>(const std::string& job, NcclExchangeOptions options)>
      node_exchanges;
  std::shared_ptr<Custody> custody;                // null: jobs end with the daemon
  std::function<absl::Time()> certificate_expiry;  // of the one for other daemons; null: there is none. Any thread
  std::string peer_address;                        // where others reach this daemon: what stands in JobConfig.nodes
  EventKeeper* history = nullptr;                  // of events and steps; null: they end with the daemon
  std::function<void()> on_idle;                   // embedded: the daemon has nothing left to do; any thread
};

using MemoryWritten = std::function<void(bool is_quiet)>;

// Thread-safe, but for what says "loop-confined". Construct, use, Shutdown.
class Core final : public JobsSource {
 public:
  Core(CoreOptions options, std::vector<std::unique_ptr<Device>> devices);
  ~Core() override;  // Shutdown()

  // Trainer side. Each calls `done` once, from any thread.
  // `secret` makes the caller, with its uid, the Tenant that the job is opened by, or that it admits.
  void OpenJob(PeerCredentials peer, JobSecret secret, v1::OpenJobRequest request, Done<v1::OpenJobResponse> done);
  void ExtendJob(PeerCredentials peer, v1::ExtendJobRequest request, Done<v1::ExtendJobResponse> done);
  // `pidfd`: of the client's process, whose end is the session's, hello or not; may be invalid.
  void AttachRank(PeerCredentials peer, const JobSecret& secret, UniqueFd pidfd, v1::AttachRankRequest request,
                  Done<v1::AttachRankResponse> done);
  // PERMISSION_DENIED: the job is not the caller's, who is no administrator.
  void CloseJob(PeerCredentials peer, const JobSecret& secret, bool is_admin, uint64_t job_id,
                std::function<void(absl::Status)> done);
  // Hello: the session becomes live and `stream` receives its events. UNAUTHENTICATED: no such session, or wrong token.
  void StartSession(uint64_t session_id, std::string token, PeerCredentials peer, std::shared_ptr<SessionStream> stream,
                    std::function<void(absl::Status)> done);
  // Ignored unless `stream` is the one that StartSession has accepted for the session: an id alone proves nothing.
  using StreamPtr = std::shared_ptr<const SessionStream>;
  // Commands, or TellWords (Session::TellWords), whose error ends the stream. `done`, once, when that was executed or
  // dropped: the next may be read. So a client that sends faster than it is served waits, and holds one batch in
  // memory.
  void SessionCommands(uint64_t session_id, StreamPtr stream, v1::SessionRequest request, std::function<void()> done);
  void SessionDetach(uint64_t session_id, StreamPtr stream, bool finished);
  void SessionStreamClosed(uint64_t session_id, StreamPtr stream);
  // The fd channel. `done` receives borrowed descriptors, valid during the call.
  void FetchFds(FdRequest request, PeerCredentials peer,
                std::function<void(absl::Status, const std::vector<int>&)> done);

  friend void AnswerOthersGradients(Core* core, PeerCredentials peer, v1::OthersGradientsRequest request,
                                    std::shared_ptr<std::shared_ptr<void>> held,
                                    JobsSource::Done<v1::OthersGradientsResponse> done);

  // JobsSource.
  void GetDaemon(const Caller& caller, Done<v1::Daemon> done) override;
  void ListJobs(const Caller& caller, Done<v1::ListJobsResponse> done) override;
  void ListRanks(const Caller& caller, const v1::JobRef& job, Done<v1::ListRanksResponse> done) override;
  void ListGroups(const Caller& caller, const v1::JobRef& job, Done<v1::ListGroupsResponse> done) override;
  void ListParameters(const Caller& caller, const v1::JobRef& job, Done<v1::ListParametersResponse> done) override;
  void ListStreams(const Caller& caller, Done<v1::ListStreamsResponse> done) override;
  void GetMetrics(const Caller& caller, Done<v1::GetMetricsResponse> done) override;
  void GetMemory(const Caller& caller, const v1::JobRef& job, Done<v1::Memory> done) override;
  void ListEvents(const Caller& caller, const v1::JobRef& job, int limit, Done<v1::ListEventsResponse> done) override;
  void CloseJobByName(const Caller& caller, const v1::JobRef& job, Done<v1::CloseJobByNameResponse> done) override;

  void TraceJob(const Caller& caller, const v1::TraceJobRequest& request, std::shared_ptr<TraceSink> sink) override;

  // Takes up the jobs that another daemon has left with the custodian. Before anybody calls. Returns when that is done,
  // but for jobs that take longer and are of one node, on CPUs: who names them comes again. RESOURCE_EXHAUSTED: this
  // daemon has too few descriptors, or too little memory, for jobs of several nodes. It is to end: the next one takes
  // all up.
  absl::Status TakeUp();
  // Closes all jobs, stops devices and threads. Jobs that a custodian keeps are the next daemon's. Idempotent.
  // `stop_listening` is called when the last steps are finished, in which ranks that are on their way take part.
  // `written` is called when no thread writes into jobs' memory any more, before it is freed; with false if one may.
  void Shutdown(const std::function<void()>& stop_listening, const MemoryWritten& written);

 private:
  // A name is one user's: others have theirs beside it.
  using JobName = std::pair<uint32_t, std::string>;
  struct PendingBatch;
  // What is to end on all nodes (core_close.cc).
  struct Closing;
  struct Entry {
    std::shared_ptr<JobCore> job;
    TurnLine<std::shared_ptr<PendingBatch>> batches;  // of its sessions' streams
    // Of the loop's time; what a turn took too much is taken from those that follow.
    absl::Duration credit;
    bool used_turn = false;                           // of the loop, in the last round
    int arriving = 0;                                 // OpenJob calls that are queued
    absl::Time empty_since = absl::InfiniteFuture();  // since when the job has no session, and no launcher
    JobLauncher launcher;
    bool freed = false;  // its ranks may still come
    // What waits to take the job's place, while its plan is in memory. The larger of the two counts: the other one
    // goes.
    std::weak_ptr<const ShardPlan> made;
    int64_t made_quota_bytes = 0;
    int64_t made_reserved_bytes = 0;
    std::shared_ptr<Closing> closing;  // waits; others that are to end the job wait with it
    absl::Time links_anew =
        absl::InfinitePast();       // when it took another's place, or was taken up: others may hear nothing yet
    int64_t QuotaBytes() const;     // (core_make.cc)
    int64_t ReservedBytes() const;  // of the host, promised and not there yet
    // What waits to end the job ends it: another daemon is not to go on with it (core_close.cc).
    void CloseNow();
  };

  // A job that the daemon before has left (core_take_up.cc).
  struct TakingUp;
  // Setup and join threads.
  // create false: NOT_FOUND where the job is not there yet.
  absl::StatusOr<v1::OpenJobResponse> OpenJobOnSetup(const PeerCredentials& peer, const JobSecret& secret,
                                                     const v1::OpenJobRequest& request, bool create);
  void ExtendJobOnSetup(const PeerCredentials& peer, const v1::ExtendJobRequest& request,
                        Done<v1::ExtendJobResponse> done);
  // What jobs have been promised, those that are being taken up among them.
  struct Promised {
    int jobs_of_uid = 0;
    int64_t bytes_of_uid = 0;    // as its quota counts them
    int64_t reserved_bytes = 0;  // of the host, and not there yet
    int64_t taken_up_bytes = 0;  // of the daemon before
    int64_t claimed_bytes = 0;   // of the host, by jobs that are being taken up, whether there or not
    // Of the host, what is not to be promised again.
    int64_t HostBytes() const;
    // ABORTED where a job did not get what it may get when others have been taken up.
    absl::Status Refusal(const absl::Status& status) const;
  };
  // (core_make.cc) `job` is none of the uid's; null: all are. On the loop.
  Promised PromisedBeside(const JobCore* job, uint32_t uid) const;
  // What takes a job's place, made beside it (core_extend.cc).
  struct Extending;
  // The node `as` trains more already: so does this one. Any thread.
  void WidenJob(uint64_t id, int as, std::shared_ptr<const Extension> extension);
  // (core_make.cc) Allocates slabs and journal; `reserved_bytes` of memory are promised to others. `extends`: it takes
  // the place of a job whose ranks have gradient slots.
  absl::StatusOr<JobCore::Init> MakeInit(uint64_t id, const Tenant& owner, const v1::JobSpec& spec, ShardPlan plan,
                                         int64_t reserved_bytes, bool extends, int node = 0, std::string link_key = "",
                                         TakenUpJob* taken_up = nullptr);
  // Several nodes (core_nodes.cc). FAILED_PRECONDITION: the daemon has no address for others, or another one.
  absl::Status CheckNode(absl::string_view what, const ShardPlan& plan, int node) const;
  // `link_key`: JobSecret::LinkKey. `late`: another job may have the name on its links, and ends.
  absl::Status AddNodes(int node, std::string link_key, bool late, JobCore::Init* init);
  // For what is freed by another thread; a GPU that hangs may keep it, and then others' jobs do without that memory.
  static constexpr absl::Duration kFreeLimit = absl::Seconds(10);
  // Runs `make` on the setup thread. If memory is short while the reaper frees what others have let go, runs it once
  // more when the reaper has done so; the thread serves others meanwhile. A reaper that a driver holds up is not
  // awaited for longer than kFreeLimit, and then not again until it runs.
  void WithMemory(std::function<absl::Status()> make, std::function<void(absl::Status)> done);
  // Where slabs of a job of so many ranks lie that belong to `rank`, or, by rank 0's, to all: on the device of that
  // rank, for every device of the job to read and write. Shards spread over the devices would have a place each.
  SlabPlace PlaceOf(int rank, int world_size) const;
  // Devices of the host that compute for a job with offload, by rank, as many for each rank; all jobs share them. They
  // are made with the first such job. With a rank: whose.
  std::vector<std::pair<Device*, int>> HostDevices(int world_size) ABSL_LOCKS_EXCLUDED(host_devices_mutex_);
  // `spec` with what depends on the devices that its ranks are on: over several GPUs, unsharding is pooled unless the
  // spec says otherwise, with a pool for each GPU; on CPUs there is nothing to offload; who adds gradients
  // (`ranks_add`: its ranks can). FAILED_PRECONDITION: it asks for another number of pools.
  absl::StatusOr<v1::JobSpec> FillIn(v1::JobSpec spec, bool ranks_add) const;
  std::shared_ptr<JobCore> MakeJob(JobCore::Init init);
  // On the job's own thread: what is waited for there, the end of a process or the memory of a session, keeps no other
  // job's ranks waiting.
  struct Attaching;
  void Attach(const std::shared_ptr<Attaching>& attaching);
  absl::StatusOr<v1::AttachRankResponse> AttachRankOnWorker(const Attaching& attaching);
  // Runs `body` on the loop from the setup thread and hands its result back.
  template <typename T>
  absl::StatusOr<T> OnLoop(std::function<absl::StatusOr<T>()> body) {
    absl::StatusOr<T> result = absl::CancelledError("the daemon is shutting down");
    loop_.RunAndWait([&] { result = body(); });
    return result;
  }

  // Jobs that a custodian keeps: their ranks are told to come again (core_take_up.cc).
  // Until the epochs that `end` has begun to end have ended, at most for `limit`; `poll` is called meanwhile. Both are
  // called on the loop.
  void EndKeptEpochs(absl::Duration limit, const std::function<bool(JobCore&)>& end,
                     const std::function<void(JobCore&)>& poll);
  // RESOURCE_EXHAUSTED: the uid has too many calls under way. Else End must follow.
  absl::Status Begin(uint32_t uid, absl::string_view what) ABSL_LOCKS_EXCLUDED(requests_mutex_);
  void End(uint32_t uid) ABSL_LOCKS_EXCLUDED(requests_mutex_);

  // A batch of a stream that is being executed, a turn at a time.
  struct PendingBatch {
    uint64_t session_id = 0;
    StreamPtr stream;
    bool tells_words = false;  // instead of commands
    v1::CommandBatch batch;
    int next = 0;
    std::function<void(JobCore& job, const Session& session)> ask;  // instead of both; without a stream
    std::function<void()> done;
  };

  // Loop-confined.
  void AddBatch(const std::shared_ptr<PendingBatch>& pending);
  void EndBatch(const std::shared_ptr<PendingBatch>& pending);
  // The job's turn of this round; true if there was something to do.
  bool Serve(Entry& entry, absl::Duration turn);
  bool ExecuteBatches(Entry& entry, absl::Time until);
  bool BeforeSleep();
  void Tick();
  JobCore* FindJob(uint64_t job_id) const;
  // As JobsSource says it.
  absl::StatusOr<JobCore*> FindJobByName(const Caller& caller, const v1::JobRef& ref) const;
  Session* FindSession(uint64_t session_id, JobCore** job) const;
  Entry* FindEntryOf(const JobCore& job);
  Session* FindSessionOf(uint64_t session_id, const SessionStream& stream, JobCore** job) const;
  void ReviewJobs();  // grace times, finished and closed jobs
  void ReviewEmpty(Entry* entry, absl::Time now);
  // `fill` runs on the loop; what it returns, unless that is null, on the status thread, for answers that grow with the
  // plan.
  template <typename T>
  using Fill = std::function<std::function<void(T*)>(const JobCore&, T*)>;
  template <typename T>
  void Query(const Caller& caller, const v1::JobRef& job, Done<T> done, Fill<T> fill);

  // Constant after construction.
  const CoreOptions options_;
  const std::vector<std::unique_ptr<Device>> devices_;
  const absl::Time start_time_;  // for people
  const absl::Time started_;     // MonotonicNow
  const JobCustody custody_;
  // Self-synchronised.
  EventLog events_;
  std::atomic<bool> stopping_ = false;  // what is queued is refused, not worked off
  LastEpochs last_epochs_;
  absl::Mutex host_devices_mutex_;
  std::vector<std::unique_ptr<Device>> host_devices_
      ABSL_GUARDED_BY(host_devices_mutex_);  // never fewer, in their place
  absl::Mutex requests_mutex_;
  absl::flat_hash_map<uint32_t, int> requests_of_uid_ ABSL_GUARDED_BY(requests_mutex_);  // OpenJob and AttachRank
  // Loop-confined.
  absl::btree_map<JobName, Entry> jobs_;
  FreedJobs freed_;
  EarlyRefusals early_refusals_;
  uint64_t next_job_id_;
  uint64_t next_session_id_ = 1;
  int opening_ = 0;  // OpenJob calls under way
  bool had_job_ = false;
  bool idle_reported_ = false;
  absl::Time review_custody_at_ = absl::InfinitePast();
  HeapTrim heap_trim_;
  // Threads; last.
  // Used as queues with a thread, for work that blocks: giving memory back, making slabs of jobs, and what must not
  // wait for those.
  TurnQueue copier_{"copier"};              // of values, of all jobs, by turns
  std::atomic<bool> reaper_stuck_ = false;  // WithMemory gave up
  CoreLoop reaper_{nullptr, "reaper", CoreLoop::Urgency::kQueue};
  // Reads initial values of jobs that span several nodes.
  CoreLoop node_values_{nullptr, "node values", CoreLoop::Urgency::kQueue};
  CoreLoop status_{nullptr, "status", CoreLoop::Urgency::kQueue};
  CoreLoop setup_{nullptr, "setup", CoreLoop::Urgency::kQueue};
  CoreLoop join_{nullptr, "join", CoreLoop::Urgency::kQueue};  // plans what comes: computes, and waits for nothing
  CoreLoop loop_;
  TakeUps take_ups_;
};

// What a rank asks beside its commands (TrainerService.OthersGradients). Calls `done` once, from any thread. Before
// that it may set *held, which the caller lets go of when the answer is read: a session has few that are not.
void AnswerOthersGradients(Core* core, PeerCredentials peer, v1::OthersGradientsRequest request,
                           std::shared_ptr<std::shared_ptr<void>> held,
                           JobsSource::Done<v1::OthersGradientsResponse> done);

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_CORE_H_
