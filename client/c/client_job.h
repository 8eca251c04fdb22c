#ifndef SHARDD_CLIENT_C_CLIENT_JOB_H_
#define SHARDD_CLIENT_C_CLIENT_JOB_H_

// One attached rank: what shardd_job is behind the C ABI, whose header has the contracts. Keeps the rank's own view of
// the job (handles, counts, versions) and checks every call against it before a record is written, so that a mistake is
// an error in the call that made it.
//
//   client_job.cc       attach, reattach, detach, what is known of steps
//   client_commands.cc  unshard, reshard, gradients, backward
//   client_recovery.cc  a forward or backward that user code gave up
//   client_values.cc    writing parameters and gradients
//   client_extend.cc    more to train
//   client_full_params.cc  full parameters
//   client_shards.cc    looking at shards directly
//   client_describe.cc  what the daemon counts
//   client_step.cc      the optimizer step
//   client_cuda_stream.cc  order by the program's stream
//   client_windows.cc   passes and write windows
//   write_faults.cc     a first store into a protected shard opens the window

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/c/client_graph.h"
#include "client/c/client_session.h"
#include "client/c/interrupt.h"
#include "common/handle/handle.h"
#include "common/plan/plan.h"
#include "common/plan/session_layout.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

struct AttachOptions {
  v1::JobSpec spec;
  int rank = 0;
  int local_world = 1;
  std::string address;  // empty: found or started
  bool replace = false;
  bool adopt = false;
  bool device_memory = false;
  int node = 0;  // of the spec's nodes
  absl::Duration timeout;
  v1::Launcher launcher;  // start_ticks 0: none is told
};

struct FullParamsOptions {
  int group = -1;  // -1: the whole model
  bool recurse = true;
  bool writeback = false;
  bool rank0_only = false;
  bool with_grads = false;
};

struct StepResult {
  int64_t committed_step = 0;
  double grad_norm = 0;
  double clip_factor = 1;
  bool skipped = false;
};

// What the daemon of a GivenTarget says of itself, as JSON. None is started.
absl::StatusOr<std::string> DescribeDaemonJson(absl::string_view address, absl::Duration timeout);

// Thread-compatible. ABORTED, UNAVAILABLE and whatever else ended the session are sticky until Reattach.
class ClientJob {
 public:
  ~ClientJob();
  static absl::StatusOr<std::unique_ptr<ClientJob>> Attach(AttachOptions options);
  absl::Status Reattach();
  // True: a wider job has taken this one's place, which is over.
  absl::StatusOr<bool> Extend(v1::JobSpec spec);
  // At most 5 s. The job is of no further use.
  absl::Status Detach(bool finished);

  const ShardPlan& plan() const { return plan_; }
  const v1::JobSpec& spec() const { return options_.spec; }
  int rank() const { return options_.rank; }
  bool created() const { return created_; }
  uint64_t epoch() const { return epoch_; }
  const std::string& device() const { return device_; }
  // The GPU that pointers are of, as this process numbers them; -1: of the host.
  int device_ordinal() const { return session_ == nullptr ? -1 : session_->device_ordinal(); }
  // On GPUs, and the host has its state.
  bool offloaded() const { return device_ordinal() >= 0 && plan_.config.offload() == v1::OFFLOAD_HOST; }
  const std::string& address() const { return target_.address; }
  uint64_t expected_version() const { return expected_version_; }
  // Both look at the version word first.
  int64_t committed_step();
  const std::string& trainer_state();
  // The number of the step that is being made: what follows belongs to it.
  int64_t running_step() const {
    return (progress_.pending_steps.empty() ? committed_step_ : progress_.pending_steps.back().step) +
           (progress_.pass_begins && progress_.entering_stepped ? 2 : 1);
  }
  uint64_t commands() const { return session_ == nullptr ? 0 : session_->submitted(); }
  SessionCounters counters() const { return session_ == nullptr ? SessionCounters() : session_->counters(); }

  // REQUIRES of all below: group and param within the plan.
  absl::Status Unshard(int group, HandleEvent event);
  absl::Status WaitUnshard(int group);
  const void* ParameterData(int param) const;
  absl::Status Reshard(int group);
  absl::Status WaitGradientSlot(int group);
  void* GradientData(int param) const;
  absl::Status SubmitGradients(int group, const uint8_t* present, const uint8_t* fresh);
  absl::Status BackwardDone(bool last);
  absl::Status AbandonBackward();
  absl::Status SetGradientPresence(int param, bool present);
  absl::Status GiveBackGradient(int param);

  absl::Status WriteParameter(int param, const void* data, int64_t first, int64_t numel);
  absl::Status WriteOptimizerState(int param, int state, const float* data, int64_t first, int64_t numel);
  absl::Status WriteUpdateCount(int param, int64_t count);
  absl::Status CommitParameters();
  absl::Status WriteGradient(int param, const void* data, int64_t first, int64_t numel);
  // REQUIRES: options.group within the plan.
  absl::Status EnterFullParams(const FullParamsOptions& options);
  const void* FullParameterData(int param) const;
  const void* FullGradientData(int param) const;
  absl::Status LeaveFullParams();

  const void* StoredParameterData(int param) const;
  void* GradientShardData(int param) const;
  absl::Status WaitGradients();
  absl::Status SetCudaStream(void* stream);
  absl::Status ClearCudaStream();
  bool stream_ordered() const { return session_ != nullptr && session_->stream_ordered(); }
  // CUDA graphs (client_graph.h).
  absl::StatusOr<int> BeginGraph();
  absl::Status EndGraph();
  absl::Status LaunchGraph(int id, void* exec);
  absl::Status FreeGraph(int id);
  void SetInterrupt(Interrupt::Question question) { interrupt_.Set(std::move(question)); }
  // Jobs whose trainers write.
  absl::Status EnterPass(bool stepped, absl::string_view state);
  absl::Status LeavePass();
  absl::Status PausePass();
  bool inside_pass() const;
  absl::Status ResumePass();
  absl::Status OpenWindow();
  // A store into protected shards opens the window by itself from now on.
  absl::Status WatchWrites(bool watch);
  // The store at `address` has faulted. Whether it may be tried again. Async-signal-safe but for what an error costs.
  bool OnWriteFault(const void* address);
  // Maps the optimizer state with the first call. Null: no such state.
  void* OptimizerStateData(int param, int state);
  bool OptimizerStateIsStored() const {
    return session_ != nullptr && failure_.ok() && progress_.state_written.empty();
  }
  // The daemon's v1::Job as JSON. One unary call.
  absl::StatusOr<std::string> DescribeJson();

  // `step.trainer_state` is set from `state`.
  absl::Status Step(v1::Step step, absl::string_view state);
  absl::StatusOr<StepResult> WaitStep();
  absl::Status AwaitStep();

 private:
  enum class FullParams { kOutside, kEntering, kInside };
  // A step sent in this session whose commit this rank has not seen yet.
  struct PendingStep {
    int64_t step;
    uint64_t version;
    std::string trainer_state;
  };
  struct Slot {
    uint64_t submissions = 0;
    int holder = -1;    // the group that has waited for it and may write
    bool told = false;  // the daemon knows that this rank is stuck on it
  };
  // All that a session resets.
  struct Progress {
    std::vector<Handle> handles;
    std::vector<uint64_t> unshards;          // by group: Unshard records sent
    std::vector<int64_t> pool_offset_bytes;  // by group: where it lies, POOLED
    std::vector<Slot> slots;
    std::vector<uint64_t> mask_record;  // by group: the last record that uses its masks
    uint64_t payload_record = 0;        // the last record that uses the payload area
    uint64_t half_record[2] = {0, 0};   // the same by half, while it stages parameters
    int half = 0;
    int64_t half_used_bytes = 0;
    int backwards = 0;              // closed in this step
    uint64_t backwards_closed = 0;  // in this session
    bool last_closed = false;
    bool backward_open = false;  // gradients were submitted since the last BackwardDone
    bool has_gradients = false;  // the running step may have some, of this rank or written by any
    FullParams full_params = FullParams::kOutside;
    FullParamsOptions full;       // as entered
    std::vector<bool> summoned;   // by parameter
    std::string gradients_there;  // mask by parameter
    bool writeback = false;       // entered with it and not committed yet
    bool commit_sent = false;
    uint64_t full_params_entered = 0;
    bool inside_pass = false;
    bool paused = false;  // inside, and a store may leave it
    std::string written;  // what such a store wrote; until the next pass
    // What a store into the daemon's optimizer state wrote, in a copy of this process; until state is loaded.
    std::string state_written;
    bool state_loaded = false;   // by the commit that follows
    bool entering_pass = false;  // the record is sent; an interrupted wait goes on
    bool entering_stepped = false;
    std::string entering_state;
    bool wants_window = false;  // likewise
    // pass_copies: the program's stream waits for the pass that was entered, of which the host has seen no more than
    // that nothing holds it up.
    bool pass_begins = false;
    bool window = false;
    uint64_t passes = 0;
    uint64_t windows = 0;
    std::deque<PendingStep> pending_steps;
    int64_t last_step = -1;  // number of the last step sent; -1: none in this session
    uint64_t last_step_version = 0;
    uint64_t awaited_version = 0;  // what is enqueued into the program's stream runs behind its commit
  };

  friend class WriteFaults;
  explicit ClientJob(AttachOptions options) : options_(std::move(options)) {}
  // Retries what may go away by itself until `deadline`.
  absl::Status Establish(absl::Time deadline);
  absl::Status TryEstablish(absl::Time deadline);
  v1::OpenJobRequest OpenRequest() const;
  // Plans it: everything that is constant after Attach.
  absl::Status UseSpec(v1::JobSpec spec);
  void Adopt(const v1::AttachRankResponse& attach, std::unique_ptr<ClientSession> session);

  // OK while the session lives; otherwise notes the failure for good.
  absl::Status Live();
  // Notes a failure that ends the session, passes the status on.
  absl::Status Note(absl::Status status);
  void RetireSteps();

  bool pooled() const { return plan_.config.unshard_mode() == v1::UNSHARD_MODE_POOLED; }
  const GroupPlan& group(int index) const { return plan_.groups[static_cast<size_t>(index)]; }
  const std::string& group_name(int index) const { return group(index).name; }
  const ParamPlan& param(int index) const { return plan_.params[static_cast<size_t>(index)]; }
  const FlatParamPlan& flat_of(const ParamPlan& param) const {
    return plan_.flat_params[static_cast<size_t>(param.flat_param)];
  }
  // Which of the copies in a slab is this rank's.
  int64_t copy_of(int copies) const {
    return copies > 1 ? plan_.placement.replica_index[static_cast<size_t>(rank())] : 0;
  }
  // The parameter, and its reduced gradient (null: frozen), in copy `copy` of their slabs; copy 0 is what counts.
  const char* StoredAt(int index, int64_t copy) const;
  char* GradientAt(int index, int64_t copy) const;
  Handle& handle(int index) { return progress_.handles[static_cast<size_t>(index)]; }
  const Handle& handle(int index) const { return progress_.handles[static_cast<size_t>(index)]; }

  // Applies `event` to the group and those it also unshards, or to none.
  absl::Status ApplyWithTied(int group, HandleEvent event);
  absl::Status ApplyToAll(HandleEvent event);
  absl::Status SendUnshard(int group, HandleEvent event);
  absl::Status WaitUnshardOne(int group);
  // The signal of a record that gives memory back (CommandRecord::done).
  absl::StatusOr<uint64_t> GiveBack(const WaitFor& reason);
  // Until the step sent last is committed: what follows belongs to the next one.
  absl::Status WaitCommitted(const char* call, const std::string* group);
  // Until the pass that was entered has begun, for the host too: what follows is of it, for the daemon as well.
  absl::Status WaitPassBegun(const char* call, const std::string* group);
  bool pass_copies() const { return plan_.config.pass_copies(); }
  absl::Status CheckMask(int group, const char* which, const uint8_t* mask) const;
  absl::Status CheckRange(const char* call, int param, const void* data, int64_t first, int64_t numel) const;
  absl::Status CheckSummoned(const char* call, int param) const;
  // Elements of `element_bytes` each; `flags` of the record.
  absl::Status WriteElements(int param, const char* data, int64_t first, int64_t numel, int64_t element_bytes,
                             uint32_t flags);
  bool Gives(int param) const;
  absl::Status AwaitOthersLeave();
  absl::Status CheckWritable(const char* call, int param) const;
  absl::StatusOr<int64_t> Stage(const void* data, int64_t size_bytes);
  absl::Status CheckWrites(const char* call) const;
  bool EndPause();
  absl::Status ReadAgain(absl::string_view what);
  absl::Status WatchSlabs();
  absl::Status AllowWrite(const void* address);
  std::string ParameterAt(const void* address) const;  // whose shard or optimizer state it is
  absl::Status CheckStep(const v1::Step& step, absl::string_view state) const;

  absl::Status GraphError(const char* call, absl::string_view what) const;
  absl::StatusOr<JobGraph*> FindGraph(const char* call, int id) const;
  absl::Status CheckLaunch(const JobGraph& graph) const;
  absl::Status Replay(const GraphCall& call, GraphWords* words);
  // What the calls of these names do while a graph is noted.
  absl::Status NoteUnshard(int group, HandleEvent event);
  absl::Status NoteWaitUnshard(int group);
  absl::Status NoteReshard(int group);
  absl::Status NoteWaitGradientSlot(int group);
  absl::Status NoteSubmitGradients(int group, const uint8_t* present, const uint8_t* fresh);
  absl::Status NoteBackwardDone(bool last);
  absl::Status CheckTrains(const char* call, int group) const;

  // Constant after Attach.
  AttachOptions options_;
  Interrupt interrupt_;
  ShardPlan plan_;
  SessionLayout layout_;
  std::vector<std::vector<uint8_t>> trainable_masks_;  // by group
  // Of the current attachment.
  Target target_;
  uint64_t job_id_ = 0;
  bool created_ = false;
  bool attached_before_ = false;
  std::string device_;
  uint64_t epoch_ = 0;
  uint64_t expected_version_ = 0;
  int64_t committed_step_ = 0;
  std::string trainer_state_;
  Progress progress_;
  absl::Status failure_;
  bool watch_writes_ = false;
  bool has_cuda_stream_ = false;  // also of the sessions to come
  void* cuda_stream_ = nullptr;
  std::vector<std::unique_ptr<JobGraph>> graphs_;  // by number; null: freed
  JobGraph* recording_ = nullptr;                  // one of them, between BeginGraph and EndGraph
  std::unique_ptr<ClientSession> session_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_CLIENT_JOB_H_
