#ifndef SHARDD_CLIENT_CPP_SHARDD_H_
#define SHARDD_CLIENT_CPP_SHARDD_H_

// C++ over the C ABI (client/c/shardd.h, which has the contracts): header only, no dependency but the C++ library, so
// that it fits into any trainer. Names are the field's.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/c/shardd.h"

namespace shardd {

// Numerically google.rpc.Code.
enum class Code : int {
  kOk = 0,
  kCancelled = 1,
  kUnknown = 2,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kOutOfRange = 11,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15,
  kUnauthenticated = 16,
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  // Takes ownership of a C status; NULL is OK.
  static Status Take(shardd_status* status) {
    Status result;
    if (status != nullptr) {
      result.code_ = static_cast<Code>(shardd_status_code(status));
      result.message_ = shardd_status_message(status);
      shardd_status_free(status);
    }
    return result;
  }
  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  bool aborted() const { return code_ == Code::kAborted; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

class Job;

// What the loss is multiplied with so that fp16 gradients do not vanish: torch.amp.GradScaler's rule and defaults. Give
// scale() to shardd_step_options::loss_scale, and what came of the step to Update. The same on all ranks by itself:
// `skipped` is.
class LossScaler {
 public:
  explicit LossScaler(double scale = 65536, double growth = 2, double backoff = 0.5, int growth_interval = 2000)
      : scale_(scale), growth_(growth), backoff_(backoff), growth_interval_(growth_interval) {}
  double scale() const { return scale_; }
  void Update(bool skipped) {
    if (skipped) {
      scale_ *= backoff_;
      good_ = 0;
    } else if (++good_ == growth_interval_) {
      scale_ *= growth_;
      good_ = 0;
    }
  }

 private:
  double scale_, growth_, backoff_;
  int growth_interval_;
  int good_ = 0;  // steps in a row
};

// A view of one parameter, valid as long as its source says.
struct ParameterView {
  const void* data = nullptr;
  shardd_param_info info{};
};

// What one unshard/reshard pair moves. A light handle; outlived by its Job.
class ParameterGroup {
 public:
  ParameterGroup(shardd_job* job, int32_t index) : job_(job), index_(index) {}
  int32_t index() const { return index_; }
  shardd_group_info info() const {
    shardd_group_info info{};
    info.struct_size = sizeof(info);
    shardd_status_free(shardd_get_group_info(job_, index_, &info));
    return info;
  }
  // Starts and waits.
  Status Unshard(shardd_phase phase) {
    Status status = UnshardAsync(phase);
    return status.ok() ? Wait() : status;
  }
  Status UnshardAsync(shardd_phase phase) { return Status::Take(shardd_unshard(job_, index_, phase)); }
  Status Wait() { return Status::Take(shardd_wait_unshard(job_, index_)); }
  Status Reshard() { return Status::Take(shardd_reshard(job_, index_)); }
  Status WaitGradientSlot() { return Status::Take(shardd_wait_gradient_slot(job_, index_)); }
  Status SubmitGradients(const uint8_t* present = nullptr, const uint8_t* fresh = nullptr) {
    return Status::Take(shardd_submit_gradients(job_, index_, present, fresh));
  }

 private:
  shardd_job* job_;
  int32_t index_;
};

// One attached rank. Move-only. The destructor detaches without `finished`: the job is kept for its grace time.
class Job {
 public:
  struct Options {
    std::string spec_json;
    int32_t rank = -1;
    std::string address;
    bool replace = false;
    bool adopt = false;
    int64_t timeout_ms = 0;
    bool device_memory = false;
    int32_t node = -1;
    bool ends_with_launcher = false;
    std::string job_secret;      // empty: from the environment
    int64_t daemon_wait_ms = 0;  // for another daemon where this one ends; 0: from the environment, else 60 000
  };
  static Status Attach(const Options& options, std::unique_ptr<Job>* job) {
    shardd_attach_options c{};
    c.struct_size = sizeof(c);
    c.spec_json = options.spec_json.c_str();
    c.rank = options.rank;
    c.address = options.address.empty() ? nullptr : options.address.c_str();
    c.replace = options.replace ? 1 : 0;
    c.adopt = options.adopt ? 1 : 0;
    c.timeout_ms = options.timeout_ms;
    c.device_memory = options.device_memory ? 1 : 0;
    c.node = options.node;
    c.ends_with_launcher = options.ends_with_launcher ? 1 : 0;
    c.job_secret = options.job_secret.empty() ? nullptr : options.job_secret.c_str();
    c.daemon_wait_ms = options.daemon_wait_ms;
    shardd_job* raw = nullptr;
    Status status = Status::Take(shardd_attach(&c, &raw));
    if (status.ok()) {
      job->reset(new Job(raw));
    }
    return status;
  }
  ~Job() { shardd_status_free(job_ != nullptr ? shardd_detach(job_, 0) : nullptr); }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Ends waits when it returns non-zero: see shardd_set_interrupt. The static one is for every job without its own, and
  // for Attach.
  Status SetInterrupt(int (*interrupted)(void*), void* context = nullptr) {
    return job_ == nullptr ? Status(Code::kFailedPrecondition, "set_interrupt: the job is finished")
                           : Status::Take(shardd_set_interrupt(job_, interrupted, context));
  }
  static Status SetProcessInterrupt(int (*interrupted)(void*), void* context = nullptr) {
    return Status::Take(shardd_set_interrupt(nullptr, interrupted, context));
  }
  // The CUDA stream whose work uses the job's memory, on a GPU: see shardd_set_cuda_stream.
  Status SetCudaStream(void* stream) { return Status::Take(shardd_set_cuda_stream(job_, stream)); }
  Status ClearCudaStream() { return Status::Take(shardd_clear_cuda_stream(job_)); }
  // CUDA graphs: see shardd_begin_graph.
  Status BeginGraph(int32_t* graph) { return Status::Take(shardd_begin_graph(job_, graph)); }
  Status EndGraph() { return Status::Take(shardd_end_graph(job_)); }
  Status LaunchGraph(int32_t graph, void* cuda_graph_exec) {
    return Status::Take(shardd_launch_graph(job_, graph, cuda_graph_exec));
  }
  Status FreeGraph(int32_t graph) { return Status::Take(shardd_free_graph(job_, graph)); }
  Status Reattach() { return Status::Take(shardd_reattach(job_)); }
  // More to train: see shardd_extend_job. Where *extended, this job is over: drop it and attach with `adopt`.
  Status Extend(const std::string& spec_json, bool* extended) {
    int32_t is_extended = 0;
    Status status = Status::Take(shardd_extend_job(job_, spec_json.c_str(), &is_extended));
    *extended = is_extended != 0;
    return status;
  }
  // This rank needs the job no more.
  Status Finish() { return Status::Take(shardd_detach(std::exchange(job_, nullptr), 1)); }

  shardd_job_info info() const {
    shardd_job_info info{};
    info.struct_size = sizeof(info);
    shardd_status_free(shardd_get_job_info(job_, &info));
    return info;
  }
  std::string trainer_state() const {
    size_t size = 0;
    const void* data = shardd_trainer_state(job_, &size);
    return size == 0 ? std::string() : std::string(static_cast<const char*>(data), size);
  }
  ParameterGroup group(int32_t index) { return ParameterGroup(job_, index); }
  int32_t FindGroup(const std::string& name) const { return shardd_find_group(job_, name.c_str()); }
  int32_t FindParameter(const std::string& fqn) const { return shardd_find_param(job_, fqn.c_str()); }
  shardd_param_info parameter_info(int32_t param) const {
    shardd_param_info info{};
    info.struct_size = sizeof(info);
    shardd_status_free(shardd_get_param_info(job_, param, &info));
    return info;
  }
  shardd_shard_info shard_info() const {
    shardd_shard_info info{};
    info.struct_size = sizeof(info);
    shardd_status_free(shardd_get_shard_info(job_, &info));
    return info;
  }
  shardd_shard_range shard_range(int32_t param) const {
    shardd_shard_range range{};
    range.struct_size = sizeof(range);
    shardd_status_free(shardd_get_shard_range(job_, param, &range));
    return range;
  }
  // `flat_param`: as parameter_info has it.
  shardd_flat_param_info flat_parameter_info(int32_t flat_param) const {
    shardd_flat_param_info info{};
    info.struct_size = sizeof(info);
    shardd_status_free(shardd_get_flat_param_info(job_, flat_param, &info));
    return info;
  }
  // What a rank's shard of a flat parameter has, in order, and its elements of padding.
  struct ShardPieces {
    std::vector<shardd_shard_piece> pieces;
    int64_t padding_numel = 0;
  };
  Status GetShardPieces(int32_t flat_param, int32_t rank, ShardPieces* result) const {
    result->pieces.resize(static_cast<size_t>(flat_parameter_info(flat_param).param_count));
    int32_t count = 0;
    Status status = Status::Take(shardd_get_shard_pieces(job_, flat_param, rank, result->pieces.data(),
                                                         static_cast<int32_t>(result->pieces.size()), &count,
                                                         &result->padding_numel));
    result->pieces.resize(static_cast<size_t>(status.ok() ? count : 0));
    return status;
  }
  // Every name of every parameter with its index, in plan order: a tied parameter has several, its own first.
  std::vector<std::pair<std::string, int32_t>> ParameterNames() const {
    std::vector<std::pair<std::string, int32_t>> names;
    const int32_t count = info().param_count;
    for (int32_t param = 0; param < count; ++param) {
      const shardd_param_info info = parameter_info(param);
      names.emplace_back(info.fqn, param);
      for (int32_t i = 0; i < info.alias_count; ++i) {
        names.emplace_back(info.aliases[i], param);
      }
    }
    return names;
  }
  // data is nullptr while its group is not unsharded. An unknown name gives data nullptr and fqn nullptr.
  ParameterView Parameter(const std::string& fqn) const {
    ParameterView view;
    const int32_t param = FindParameter(fqn);
    if (param >= 0) {
      view.info = parameter_info(param);
      view.data = shardd_parameter_data(job_, param);
    }
    return view;
  }
  const void* parameter_data(int32_t param) const { return shardd_parameter_data(job_, param); }
  void* gradient_data(int32_t param) const { return shardd_gradient_data(job_, param); }

  Status WriteParameter(int32_t param, const void* data, int64_t first, int64_t numel) {
    return Status::Take(shardd_write_parameter(job_, param, data, first, numel));
  }
  Status CommitParameters() { return Status::Take(shardd_commit_parameters(job_)); }
  // Jobs whose trainers write their shards; see shardd.h.
  Status EnterPass(bool stepped = false, const std::string& state = "") {
    return Status::Take(shardd_enter_pass(job_, stepped ? 1 : 0, state.data(), state.size()));
  }
  Status LeavePass() { return Status::Take(shardd_leave_pass(job_)); }
  Status StopReading() { return Status::Take(shardd_stop_reading(job_)); }
  Status ResumeReading() { return Status::Take(shardd_resume_reading(job_)); }
  bool inside_pass() const { return shardd_inside_pass(job_) != 0; }
  Status HasEdits(bool* has_edits) {
    int32_t has = 0;
    Status status = Status::Take(shardd_has_edits(job_, &has));
    *has_edits = has != 0;
    return status;
  }
  Status HandInEdits() { return Status::Take(shardd_hand_in_edits(job_)); }
  Status WatchWrites(bool on = true) { return Status::Take(shardd_watch_writes(job_, on ? 1 : 0)); }
  // The stored parameter; shard_range(param) says what of it may be written.
  void* shard_data(int32_t param) const { return const_cast<void*>(shardd_stored_parameter_data(job_, param)); }
  void* gradient_shard_data(int32_t param) const { return shardd_gradient_shard_data(job_, param); }
  void* optimizer_state_data(int32_t param, int32_t state) const {
    return shardd_optimizer_state_data(job_, param, state);
  }
  Status WaitGradients() { return Status::Take(shardd_wait_gradients(job_)); }
  // This rank's part of the gradient: written by the trainer, or dropped.
  Status SetGradientPresence(int32_t param, bool present) {
    return Status::Take(shardd_set_gradient_presence(job_, param, present ? 1 : 0));
  }
  // Its memory, until new gradients come.
  Status GiveBackGradient(int32_t param) { return Status::Take(shardd_give_back_gradient(job_, param)); }
  // After an exception in user code; see shardd.h.
  Status AbandonBackward() { return Status::Take(shardd_abandon_backward(job_)); }
  Status BackwardDone(bool last) { return Status::Take(shardd_backward_done(job_, last ? 1 : 0)); }
  Status Step(const std::vector<shardd_hyperparameters>& groups, double max_grad_norm = 0,
              const std::string& trainer_state = "") {
    return Status::Take(shardd_step(job_, groups.data(), static_cast<int32_t>(groups.size()), max_grad_norm,
                                    trainer_state.data(), trainer_state.size()));
  }
  // With all that a step can be told; `options.struct_size` is set here.
  Status StepWith(shardd_step_options options) {
    options.struct_size = sizeof(options);
    return Status::Take(shardd_step_with(job_, &options));
  }
  Status WaitStep(shardd_step_result* result = nullptr) { return Status::Take(shardd_wait_step(job_, result)); }
  Status AwaitStep() { return Status::Take(shardd_await_step(job_)); }

  struct FullParams {  // as shardd_full_params_options
    int32_t group = -1;
    bool recurse = true;
    bool writeback = false;
    bool rank0_only = false;
    bool offload_to_cpu = false;
    bool with_grads = false;
  };
  // All ranks together, outside of forward and backward; until they leave nothing can be unsharded.
  Status EnterFullParams(const FullParams& options) {
    shardd_full_params_options c{};
    c.struct_size = sizeof(c);
    c.group = options.group;
    c.recurse = options.recurse ? 1 : 0;
    c.writeback = options.writeback ? 1 : 0;
    c.rank0_only = options.rank0_only ? 1 : 0;
    c.offload_to_cpu = options.offload_to_cpu ? 1 : 0;
    c.with_grads = options.with_grads ? 1 : 0;
    return Status::Take(shardd_enter_full_params_with(job_, &c));
  }
  Status LeaveFullParams() { return Status::Take(shardd_leave_full_params(job_)); }
  // UnshardParams({.writeback = true}, [&] { ... read full_parameter_data ... WriteParameter ... }): enter, run,
  // commit, leave. Where `body` throws, a job that was entered without writeback is left; one with writeback stays
  // entered, because what was written so far would become everybody's: detach then.
  template <typename Body>
  Status UnshardParams(const FullParams& options, Body&& body) {
    Status status = EnterFullParams(options);
    if (!status.ok()) {
      return status;
    }
    LeaveOnUnwind guard{options.writeback ? nullptr : job_};
    body();
    guard.job = nullptr;
    if (options.writeback) {
      status = CommitParameters();
    }
    Status left = LeaveFullParams();
    return status.ok() ? left : status;
  }
  template <typename Body>
  Status UnshardParams(bool writeback, Body&& body) {
    FullParams options;
    options.writeback = writeback;
    return UnshardParams(options, std::forward<Body>(body));
  }
  const void* full_gradient_data(int32_t param) const { return shardd_full_gradient_data(job_, param); }
  Status WriteGradient(int32_t param, const void* data, int64_t first, int64_t numel) {
    return Status::Take(shardd_write_gradient(job_, param, data, first, numel));
  }
  const void* full_parameter_data(int32_t param) const { return shardd_full_parameter_data(job_, param); }

  shardd_job* c_job() const { return job_; }

 private:
  struct LeaveOnUnwind {
    shardd_job* job;
    ~LeaveOnUnwind() { shardd_status_free(job != nullptr ? shardd_leave_full_params(job) : nullptr); }
  };
  explicit Job(shardd_job* job) : job_(job) {}
  shardd_job* job_;
};

// Of a job whose trainers have an optimizer of their own; see shardd.h.
inline Status AwaitStore(const Job& job) { return Status::Take(shardd_await_store(job.c_job())); }

// After WaitGradients: the parameters whose gradients others gave and this rank did not; see shardd.h.
inline Status GivenByOthers(const Job& job, std::vector<int32_t>* params) {
  const int32_t* given = nullptr;
  int32_t count = 0;
  Status status = Status::Take(shardd_given_by_others(job.c_job(), &given, &count));
  params->assign(given, given + count);
  return status;
}

}  // namespace shardd

#endif  // SHARDD_CLIENT_CPP_SHARDD_H_
