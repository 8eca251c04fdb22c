/* shardd's client library: the C ABI. Nothing else is exported from libshardd.so.
 *
 * A trainer attaches one rank of a job, then for every step: unshard a group, compute with it, reshard it; write
 * gradients into the group's gradient slot, submit them; close each backward; step. Parameters, gradients shards and
 * optimizer state live in the daemon; what this library returns are pointers into shared memory.
 *
 * Threads: a shardd_job is used by one thread at a time. Different jobs are independent. After fork() every call in the
 * child is refused, because the memory is not mapped there: FAILED_PRECONDITION, or NULL and -1 where no status is
 * returned. Only shardd_status_*, shardd_version and shardd_string_free work there.
 * Errors: every fallible call returns NULL for success, else a status that the caller frees with shardd_status_free.
 * Codes are those of google.rpc.Code. ABORTED: the epoch advanced (a rank died, or the step was ended by an error that
 * the text explains); everything since the last committed step is dropped; call shardd_reattach and rewind to
 * shardd_job_info.committed_step with shardd_trainer_state. UNAVAILABLE: the daemon is gone; shardd_reattach waits
 * for its successor (options.daemon_wait_ms). NOT_FOUND during training: the job was closed, for good. The first two
 * are sticky until shardd_reattach. FAILED_PRECONDITION and INVALID_ARGUMENT are found before anything is sent and cost
 * the session nothing. Blocking: calls marked [waits] block until the named event, at most options.timeout_ms, then
 * DEADLINE_EXCEEDED with who is waited for, or until the host wants them to end (shardd_set_interrupt), then CANCELLED.
 * All others return without waiting for another process.
 */
#ifndef SHARDD_CLIENT_C_SHARDD_H_
#define SHARDD_CLIENT_C_SHARDD_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define SHARDD_API __attribute__((visibility("default")))
#else
#define SHARDD_API
#endif

typedef struct shardd_status shardd_status;
typedef struct shardd_job shardd_job;

SHARDD_API int shardd_status_code(const shardd_status* status);            /* 0 for NULL */
SHARDD_API const char* shardd_status_message(const shardd_status* status); /* "" for NULL; valid until freed */
SHARDD_API void shardd_status_free(shardd_status* status);                 /* NULL is allowed */

SHARDD_API const char* shardd_version(void); /* "0.1.0" */

typedef enum shardd_dtype { /* numerically equal to shardd.v1.DType */
                            SHARDD_FLOAT32 = 1,
                            SHARDD_BFLOAT16 = 2,
                            SHARDD_FLOAT16 = 3,
                            SHARDD_FLOAT64 = 4,
                            SHARDD_INT64 = 5,
                            SHARDD_INT32 = 6,
                            SHARDD_INT16 = 7,
                            SHARDD_INT8 = 8,
                            SHARDD_UINT8 = 9,
                            SHARDD_BOOL = 10
} shardd_dtype;

typedef struct shardd_attach_options {
  size_t struct_size; /* sizeof(shardd_attach_options) */
  /* shardd.v1.JobSpec in proto3 JSON (proto/shardd/v1/model.proto): name, worldSize, tree, policy, config. worldSize 0
   * or absent: WORLD_SIZE from the environment; with config.nodes, of which each has ranks of its own,
   * LOCAL_WORLD_SIZE.
   */
  const char* spec_json;
  int32_t rank; /* -1: RANK from the environment; with config.nodes LOCAL_RANK */
  /* 1: the job may lie on GPUs, and this program takes pointers into their memory (see "Memory of GPUs"). 0: a daemon
   * with GPUs refuses the job with FAILED_PRECONDITION. */
  int32_t device_memory;
  /* "unix:/path" or "/path". NULL: SHARDD_ADDRESS; else /run/shardd/shardd.sock where a daemon listens; else a daemon
   * of this user is started (found beside this library, in SHARDD_DAEMON or in PATH) with one CPU device per local rank
   * (LOCAL_WORLD_SIZE, else the world size), or with device_memory all GPUs where there are some and it
   * has kernels for them. It ends after its last job. */
  const char* address;
  int32_t replace; /* 1: kill a live holder of this rank, or one that may still store into its shards; take its place */
  /* 1: the job may train more than the spec says, after shardd_extend_job: it is taken as it is, and shardd_param_info
   * tells what it trains. 0: such a job is FAILED_PRECONDITION. */
  int32_t adopt;
  int64_t timeout_ms; /* bound of attach and of every wait; 0: 300 000 */
  /* Which of config.nodes this one is, from 0; 0 where there are none. -1: SHARDD_NODE, else GROUP_RANK (torchrun) from
   * the environment where there are some, else 0. */
  int32_t node;
  /* 1: nobody but processes of this launcher (torchrun) knows the job's name, so the job ends with it. 0: such a job is
   * kept for its grace time when the launcher has ended. Either way it is kept as long as the launcher lives, unless
   * SHARDD_GRACE_MS says for how long. */
  int32_t ends_with_launcher;
  /* A secret of 16 to 64 bytes, zero-terminated, that the job is opened with: then only a process that gives the same
   * one, beside having the same uid, may attach to the job, close or look at it. The library keeps a copy until the job
   * is detached. NULL: SHARDD_JOB_SECRET, else the contents of the file SHARDD_JOB_SECRET_FILE, else the job has none.
   * PERMISSION_DENIED: the job has another one. FAILED_PRECONDITION: it was opened without one. */
  const char* job_secret;
  /* How long shardd_reattach waits for a daemon where there is none. After a second it says so on standard error. 0:
   * SHARDD_DAEMON_WAIT_MS, else 60 000. */
  int64_t daemon_wait_ms;
} shardd_attach_options;

/* Opens or joins the job, attaches the rank, maps its memory. A daemon that dies meanwhile is waited for as by
 * shardd_reattach. [waits: daemon start, slab allocation] */
SHARDD_API shardd_status* shardd_attach(const shardd_attach_options* options, shardd_job** job);

/* After ABORTED or UNAVAILABLE: attaches the same rank in the current epoch. Every pointer that this job gave out
 * before is invalid afterwards. [waits] */
SHARDD_API shardd_status* shardd_reattach(shardd_job* job);

/* The job is to train what `spec_json` says beside what it trains already: parameters that were frozen, with other
 * optimizer groups. All ranks ask for the same, between a commit and their next unshard, and inside a pass or where
 * nothing is written. *extended = 1: a wider job of the same name, with the same commits, has taken its place; `job` is
 * over, so detach it and attach with `adopt`. 0: it is that job already and goes on. Gradients are not taken over. One
 * rank that goes on instead ends the epoch on all: FAILED_PRECONDITION names rank and parameter. The job is what it was
 * after an error, but after ABORTED, UNAVAILABLE, DEADLINE_EXCEEDED and an interrupted wait it may be wider: then
 * shardd_reattach returns FAILED_PRECONDITION and sets shardd_job_info.trains_more. [waits] */
SHARDD_API shardd_status* shardd_extend_job(shardd_job* job, const char* spec_json, int32_t* extended);

/* Ends the session and frees `job`. finished != 0: this rank needs the job no more; when all ranks have said so, the
 * daemon frees it. If the epoch ends meanwhile and what this rank has sent is committed, the call attaches once more to
 * say so [waits, at most options.timeout_ms]; ABORTED means that something of it was lost, or that a call before this
 * one has returned ABORTED. finished == 0: the job is kept for its grace time; a session that is over already is no
 * error then. `job` is freed in any case, but for a forked child. NULL is allowed. [waits, at most 5 s: for steps under
 * way] */
SHARDD_API shardd_status* shardd_detach(shardd_job* job, int finished);

typedef struct shardd_job_info {
  size_t struct_size;
  int32_t rank;
  int32_t world_size;
  int32_t group_count;
  int32_t param_count;
  uint64_t epoch;
  int64_t committed_step; /* steps committed, as this rank knows it */
  uint64_t version;       /* of the parameters this rank reads next; 0: none given yet */
  int32_t created;        /* 1: this attach created the job */
  const char* device;     /* "cpu:0"; valid while attached */
  const char* address;    /* of the daemon */
  /* The GPU whose memory this library's pointers are of, as this process numbers its GPUs (cuDeviceGet); -1: they are
   * pointers of the host. Another epoch may change it: look again after shardd_reattach. */
  int32_t cuda_device;
  /* 1: order is by the stream of shardd_set_cuda_stream. 0: by the host; also where that was called and the driver has
   * not what it takes: then the library waits for the stream. */
  int32_t stream_ordered;
  /* 1: the job is on GPUs and its state is offloaded to the host (JobConfig.offload; see "Memory of GPUs"). */
  int32_t offloaded;
  /* 1: passes read copies of the shards (JobConfig.passCopies; see "Jobs whose trainers write their shards"). */
  int32_t pass_copies;
  /* 1: the session is over, and this rank has lost nothing: its daemon has stopped for another one, right behind the
   * commit of the step that the rank sent last, or, where ranks edit parameters, in shardd_enter_pass behind it, with
   * the edits. A program that has begun nothing since (no forward, no gradients) goes on where it is with
   * shardd_reattach, as if there had been no abort. */
  int32_t lost_nothing;
  /* 1: shardd_reattach has returned FAILED_PRECONDITION because the job trains more by now, by a shardd_extend_job of
   * this rank whose answer was lost: detach this one, and attach with `adopt`. */
  int32_t trains_more;
} shardd_job_info;
SHARDD_API shardd_status* shardd_get_job_info(const shardd_job* job, shardd_job_info* info);

/* What this rank gave to the last committed step (shardd_step), for its replacement too. Valid until the next call. */
SHARDD_API const void* shardd_trainer_state(const shardd_job* job, size_t* size_bytes);

/* Memory of GPUs. Where shardd_job_info.cuda_device is not -1, every `data` pointer of this header (parameters,
 * gradients, gradient shards, optimizer state, full parameters) is an address that GPU reaches: for kernels and copies,
 * in its primary context, with the access that the call's contract says. No thread of the host may follow one. A kernel
 * that writes through a read-only one takes its process' whole context with it. What is written to the daemon
 * (shardd_write_parameter and its like) is given in host memory as ever.
 * Order is by the host, until shardd_set_cuda_stream: a wait that returned says that the bytes are there for whatever
 * is launched afterwards; and before shardd_reshard, shardd_submit_gradients, shardd_backward_done, shardd_step,
 * shardd_abandon_backward, shardd_enter_pass, shardd_enter_full_params, shardd_leave_full_params, shardd_extend_job and
 * shardd_reattach the program has synchronised its streams with all that reads or writes what the call gives back.
 * With JobConfig.offload OFFLOAD_HOST what is offloaded is the host's: shardd_stored_parameter_data, gradient shards,
 * optimizer state, full parameters and full gradients are pointers of the host, which its threads may follow when the
 * calls that promise them have returned, and the stream below has been synchronised; no GPU of this process reaches
 * them. shardd_parameter_data and shardd_gradient_data are the GPU's as ever.
 * The process must see the GPUs of all ranks of the job. In jobs whose trainers write passes read copies there
 * (JobConfig.passCopies, which the daemon fills in; see below). Not there is
 * shardd_full_params_options.offload_to_cpu. A GPU that is lost takes its jobs with it: NOT_FOUND, with the driver's
 * words. */

/* Order by a stream, instead of by the host. `stream` is a CUstream (cudaStream_t) of cuda_device's primary context,
 * the framework's current stream. NULL (or CU_STREAM_LEGACY) is one too: the legacy default stream of that context,
 * also for a program that was compiled with --default-stream per-thread. As the driver orders that stream with every
 * stream that is not CU_STREAM_NON_BLOCKING, those wait where it waits, and what it gives back they have done with.
 * From now on, for all that is enqueued into it afterwards:
 * - shardd_wait_unshard, shardd_wait_gradient_slot and shardd_wait_gradients return when it is known where the bytes
 *   will be and that they are under way; the stream waits for them. The host may not read behind them without
 *   synchronising the stream. Where 32 such waits are outstanding the host waits as before.
 * - shardd_reshard, shardd_submit_gradients, shardd_backward_done, shardd_step, shardd_abandon_backward,
 *   shardd_enter_pass, shardd_enter_full_params and shardd_leave_full_params give back what the stream's work so far
 *   uses when the stream has come there; nothing has to be synchronised. Where 128 of them are outstanding the host
 *   waits.
 * - shardd_enter_pass returns when all ranks have called it; the stream waits for the copies that the pass reads. The
 *   step that it commits counts in shardd_job_info when they are made.
 * - Everything else whose result the host reads blocks the host as before: shardd_wait_step, shardd_commit_parameters,
 *   shardd_enter_full_params, and what waits for the commit of an earlier step or for the pass to have begun
 *   (shardd_submit_gradients, shardd_backward_done, shardd_step, shardd_set_gradient_presence, shardd_leave_pass,
 *   shardd_abandon_backward; shardd_wait_unshard where unsharding is pooled).
 * Ranks that are threads of one process have streams of their own: a stream waits for commits, which wait for what
 * other ranks' streams give.
 * Call it again when the framework's current stream changes: the new one then runs behind what the old one, which must
 * still exist, has by now. Work of other streams is the program's to order with this one. It holds for the sessions
 * after shardd_reattach, too, which waits for the stream, as shardd_detach does.
 * A stream's wait that takes longer than options.timeout_ms, or whose daemon has died, is ended by the library: what
 * the stream computes from there is void, and the next call says why: DEADLINE_EXCEEDED, which is sticky here (call,
 * group, rank, stream), UNAVAILABLE or ABORTED; then shardd_reattach. A rank whose stream does not come to what it has
 * given back ends the epoch after JobConfig.silenceTimeoutMs. Where the driver has no 64-bit stream memory operations,
 * or does not take the pages, one line on stderr says so, and the calls that give memory back wait for the stream (at
 * most options.timeout_ms) and the others for the daemon, on the host; the program may do the same.
 * shardd_job_info.stream_ordered tells which it is. FAILED_PRECONDITION: the job's memory is the host's.
 * INVALID_ARGUMENT: a stream of another context, or CU_STREAM_PER_THREAD, which is another stream in every thread that
 * calls. */
SHARDD_API shardd_status* shardd_set_cuda_stream(shardd_job* job, void* stream);
/* Order is by the host again. The stream must have been synchronised. */
SHARDD_API shardd_status* shardd_clear_cuda_stream(shardd_job* job);

/* CUDA graphs: a forward and backward, or several, captured once and launched for every step.
 *
 *     shardd_begin_graph(job, &graph);
 *     cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);  // the stream of shardd_set_cuda_stream
 *     ... shardd_unshard, kernels, shardd_submit_gradients, ... as in any pass ...
 *     shardd_end_graph(job);
 *     cuStreamEndCapture(stream, &captured); cuGraphInstantiate(&exec, captured, 0);
 *     for (every step) { shardd_launch_graph(job, graph, exec); shardd_step(job, ...); }
 *
 * Between begin and end the calls unshard, wait_unshard, reshard, wait_gradient_slot, submit_gradients and
 * backward_done are noted, not made: nothing is sent, nothing runs. Pointers are those of all launches: parameters and
 * gradient slots do not move in a job that unshards without copies. Groups must end as they began. Everything else lies
 * outside: the step, passes (a job whose trainers write enters one before each launch), values. shardd_launch_graph
 * launches `cuda_graph_exec` (a CUgraphExec, cudaGraphExec_t) into the stream, from a thread of the library's, and
 * makes the noted calls again on the host while the GPU runs it; it returns when the stream has come to the last of
 * them. Launch it by nothing else: it would wait for ever. An error after the launch ends the session, and lets the
 * graph go: what it computes is void. [waits: for the graph's stream, and as the noted calls do] A graph belongs to its
 * session: after shardd_reattach gradient slots lie elsewhere, so capture it anew. Numbers are not given twice.
 * shardd_free_graph gives its words back; all are with the session. FAILED_PRECONDITION: order is not by a stream,
 * unshardMode is POOLED, trainerSums is true (a daemon whose GPUs are not under MPS fills that in: say false), the
 * stream is not being captured, groups are not as they were at begin; a launch is under way (free). Without
 * shardd_begin_graph, every call that would give a captured stream something to wait for is refused with
 * FAILED_PRECONDITION; graphs of what lies between calls need nothing. */
SHARDD_API shardd_status* shardd_begin_graph(shardd_job* job, int32_t* graph);
SHARDD_API shardd_status* shardd_end_graph(shardd_job* job);
SHARDD_API shardd_status* shardd_launch_graph(shardd_job* job, int32_t graph, void* cuda_graph_exec);
SHARDD_API shardd_status* shardd_free_graph(shardd_job* job, int32_t graph);

typedef struct shardd_group_info {
  size_t struct_size;
  const char* name; /* FQN of the fully sharded module, "(root)"; valid while attached */
  int32_t param_count;
  const int32_t* params; /* indices, in presence-mask order; valid while attached */
  int32_t reshard_after_forward;
  int32_t trainable; /* has a gradient slot */
  int32_t depth;
  int64_t numel;
  int32_t also_unshard_count; /* groups that hold tied parameters used by modules of this one */
  const int32_t* also_unshards;
  /* Over how many ranks the parameters are cut from the end of forward to backward. Whether they are resharded says
   * reshard_after_forward: 1 also where there is nothing to cut. */
  int32_t post_forward_shard_size;
} shardd_group_info;
SHARDD_API shardd_status* shardd_get_group_info(const shardd_job* job, int32_t group, shardd_group_info* info);

typedef struct shardd_param_info {
  size_t struct_size;
  const char* fqn; /* valid while attached */
  int32_t alias_count;
  const char* const* aliases;
  int32_t ndim;
  const int64_t* shape;
  int64_t numel;
  int32_t dtype;           /* as stored and as written back */
  int32_t unsharded_dtype; /* as unshard gives it, and of its gradient */
  int32_t requires_grad;
  int32_t group;
  int32_t index_in_group;
  int32_t flat_param;
  int64_t offset_numel; /* within the flat parameter */
  int32_t optimizer_group;
} shardd_param_info;
SHARDD_API shardd_status* shardd_get_param_info(const shardd_job* job, int32_t param, shardd_param_info* info);

/* The rank's place: shard `shard_index` of its shard group, which is one of `replicas` that hold the same. */
typedef struct shardd_shard_info {
  size_t struct_size;
  int32_t shard_world_size; /* ranks of a shard group */
  int32_t shard_index;
  int32_t replicas;
  int32_t replica_index;
} shardd_shard_info;
SHARDD_API shardd_status* shardd_get_shard_info(const shardd_job* job, shardd_shard_info* info);

/* What of a parameter the rank holds, elements [first, first + numel) of it, by what is held; numel 0: nothing. */
typedef struct shardd_shard_range {
  size_t struct_size;
  int64_t first, numel;                     /* of the parameter: its shard */
  int64_t gradient_first, gradient_numel;   /* of the reduced gradient */
  int64_t optimizer_first, optimizer_numel; /* of the optimizer state */
  /* Of the shards, and of the states of an optimizer in the trainers, what this rank's trainer writes. The
   * optimizer's range, or its shard with an optimizer of the daemon; nothing where a rank of an earlier replica writes
   * the same (JobConfig.replica_copies false). */
  int64_t write_first, write_numel;
  /* Of the reduced gradient, what this rank's trainer changes in place (clipping, unscaling): its own range, or nothing
   * where a rank of an earlier replica changes the same bytes. The ranges of all ranks cover each copy once. */
  int64_t gradient_write_first, gradient_write_numel;
} shardd_shard_range;
SHARDD_API shardd_status* shardd_get_shard_range(const shardd_job* job, int32_t param, shardd_shard_range* range);

/* The parameters of one group with the same dtype and requires_grad, one behind the other: what ranks have shards of
 * (shardd_param_info.flat_param, from 0 on). In layout FLAT each begins at a multiple of 16 bytes, and shards are of
 * one size, but where a matrix of OPTIMIZER_KIND_MUON or a parameter of OPTIMIZER_KIND_ADAFACTOR that is cut over nodes
 * is whole in one of them. Elements between and behind parameters are padding: they are 0, and no sum, norm or update
 * reads or changes them. Shards of layout DIM0 are whole rows and have none. */
typedef struct shardd_flat_param_info {
  size_t struct_size;
  int32_t group;
  int32_t param_count;
  const int32_t* params; /* indices, in the order of offset_numel; valid while attached */
  int64_t numel;         /* with padding between parameters, without that at the end */
  int64_t padded_numel;  /* of all shards */
  int64_t shard_numel;   /* of a shard, at most */
} shardd_flat_param_info;
SHARDD_API shardd_status* shardd_get_flat_param_info(const shardd_job* job, int32_t flat_param,
                                                     shardd_flat_param_info* info);

/* Elements [first, first + numel) of a parameter, which are elements from offset_numel on of its flat parameter. */
typedef struct shardd_shard_piece {
  int32_t param;
  int64_t first, numel; /* numel > 0 */
  int64_t offset_numel;
} shardd_shard_piece;
/* What the shard of `rank`, any of this node's, has of a flat parameter: of which parameters, in the order of
 * offset_numel, and how many elements of padding. Writes the first `capacity` pieces (at most param_count are there;
 * NULL with 0) and how many there are. */
SHARDD_API shardd_status* shardd_get_shard_pieces(const shardd_job* job, int32_t flat_param, int32_t rank,
                                                  shardd_shard_piece* pieces, int32_t capacity, int32_t* count,
                                                  int64_t* padding_numel);

SHARDD_API int32_t shardd_find_param(const shardd_job* job,
                                     const char* fqn); /* -1: unknown; aliases and wrapper prefixes are understood */
SHARDD_API int32_t shardd_find_group(const shardd_job* job, const char* name); /* -1: unknown */

/* Values -------------------------------------------------------------------------------------------------------- */

/* Writes elements [first, first + numel) of a parameter, in its dtype. Legal before version 1 (initial values) and
 * between shardd_enter_full_params(writeback) and shardd_commit_parameters. Several ranks may write; the last write
 * wins. Values are copied before the call returns. [waits: for staging space] */
SHARDD_API shardd_status* shardd_write_parameter(shardd_job* job, int32_t param, const void* data, int64_t first,
                                                 int64_t numel);
/* The same for fp32 state `state` (0 ..) of a trainable parameter, in a job whose optimizer the daemon runs: AdamW has
 * exp_avg and exp_avg_sq, SGD with momentum has momentum_buffer. Adafactor has row_var and col_var, with a number for
 * each row and each column of a parameter's last two dimensions; of one with fewer dimensions, variance and nothing.
 * Elements that nobody writes keep what they have; 0 at first. [waits: for staging space] */
SHARDD_API shardd_status* shardd_write_optimizer_state(shardd_job* job, int32_t param, int32_t state, const float* data,
                                                       int64_t first, int64_t numel);
/* How many updates the parameter has had: what bias correction counts from, and what makes SGD's first update the one
 * that fills momentum_buffer. Legal where shardd_write_parameter is. shardd_describe_job tells it (update_counts). */
SHARDD_API shardd_status* shardd_write_update_count(shardd_job* job, int32_t param, int64_t count);
/* This rank has written what it had to. Returns when all ranks have said so and the new version is there. [waits] */
SHARDD_API shardd_status* shardd_commit_parameters(shardd_job* job);

/* The hot path --------------------------------------------------------------------------------------------------- */

typedef enum shardd_phase { SHARDD_FORWARD = 1, SHARDD_BACKWARD = 2 } shardd_phase;

/* Asks for the full parameters of a group (and of also_unshards). Every call is paired with one shardd_reshard. */
SHARDD_API shardd_status* shardd_unshard(shardd_job* job, int32_t group, shardd_phase phase);
/* Until they can be read. Prefetched or zero-copy: one load, no system call. [waits] */
SHARDD_API shardd_status* shardd_wait_unshard(shardd_job* job, int32_t group);
/* The full parameter, numel elements of unsharded_dtype, row-major, read-only; NULL while its group is not unsharded
 * and waited for. Valid until shardd_reshard of the group; it may lie elsewhere at the next unshard. */
SHARDD_API const void* shardd_parameter_data(const shardd_job* job, int32_t param);
/* The caller has finished reading. */
SHARDD_API shardd_status* shardd_reshard(shardd_job* job, int32_t group);

/* Until the group's gradient slot may be written again. Old bytes in it have no meaning. [waits] */
SHARDD_API shardd_status* shardd_wait_gradient_slot(shardd_job* job, int32_t group);
/* Where the parameter's gradient goes: numel elements of unsharded_dtype. NULL for a frozen parameter. */
SHARDD_API void* shardd_gradient_data(const shardd_job* job, int32_t param);
/* The group's gradients of this backward are in the slot. Bit i (little endian within bytes) is parameter i of the
 * group. present NULL: all trainable ones; a parameter absent on one rank counts as zero, absent on all keeps value and
 * state (PyTorch's None). fresh NULL: none; a fresh gradient replaces what this step accumulated in earlier backwards;
 * of an absent parameter it says nothing. A group may be submitted several times in one backward, with
 * shardd_wait_gradient_slot before each: contributions add, of whichever ranks. Waits only where a step was sent and
 * its commit not yet waited for. */
SHARDD_API shardd_status* shardd_submit_gradients(shardd_job* job, int32_t group, const uint8_t* present,
                                                  const uint8_t* fresh);
/* This backward is closed: a group not submitted by now gets nothing from this rank. last != 0: a step follows. */
SHARDD_API shardd_status* shardd_backward_done(shardd_job* job, int last);
/* After an exception in user code, anywhere between the first shardd_unshard of a forward and shardd_backward_done:
 * every group of this rank is resharded, whoever held it, and the backward that is open is as if it had not begun. No
 * other rank notices. The rank then does forward and backward again (perhaps of another batch), or closes the backward
 * as it is (shardd_backward_done, or shardd_step): that is no missing contribution, whatever the configuration says.
 * Other ranks wait for it as for any backward, so at most JobConfig.silenceTimeoutMs.
 * Gradients that this rank had submitted in it are taken back as far as they are not added up yet. A group's are where
 * every other rank had submitted it or closed the backward. Those stay, because sums cannot be taken apart, and stand
 * for what this rank submits of the group when it does the backward again, which is then dropped: a rank counts once
 * per group and backward. If all ranks that are in the sum do it again and submit nothing but fresh gradients of the
 * group, these replace the sums, and what none of them submits is absent, unless earlier backwards are in its sum; so a
 * backward that failed everywhere and is done again after zero_grad leaves no trace. The exception: where ranks run
 * groups in so different orders that the second try is added before its turn, the first one stays.
 * What is closed stays: earlier backwards, a step that was sent. A pass stays entered. FAILED_PRECONDITION between
 * shardd_enter_full_params and shardd_leave_full_params. Nothing has to be open. */
SHARDD_API shardd_status* shardd_abandon_backward(shardd_job* job);

typedef struct shardd_hyperparameters { /* of one optimizer group; torch's meanings */
  double lr, weight_decay;
  union {
    double beta1;       /* Adam, AdamW, Lion */
    double lr_decay;    /* Adagrad */
    double ns_a;        /* Muon: ns_coefficients, torch's default 3.4445, -4.775, 2.0315 */
    double beta2_decay; /* Adafactor: <= 0 */
  };
  union {
    double beta2;                     /* Adam, AdamW, Lion */
    double alpha;                     /* RMSprop */
    double initial_accumulator_value; /* Adagrad */
    double ns_b;                      /* Muon */
    double eps2;                      /* Adafactor: eps[1] */
  };
  double eps;      /* Adam, AdamW, Adagrad, RMSprop, Muon; Adafactor: eps[0], -1 as torch's None */
  double momentum; /* SGD, RMSprop, Muon */
  union {
    double dampening; /* SGD */
    double ns_c;      /* Muon */
    double d;         /* Adafactor: >= 1, or 0 for 1 */
  };
  int32_t nesterov;  /* SGD, Muon */
  int16_t ns_steps;  /* Muon: 0 to 99 */
  int16_t adjust_lr; /* Muon: shardd_adjust_lr */
} shardd_hyperparameters;
typedef enum shardd_adjust_lr { /* torch.optim.Muon's adjust_lr_fn */
                                SHARDD_ADJUST_LR_ORIGINAL = 0,
                                SHARDD_ADJUST_LR_MATCH_RMS_ADAMW = 1
} shardd_adjust_lr;

/* Asks for the optimizer step. All groups must be resharded, every backward with gradients closed. `state` (at most
 * 1 MiB) is committed with the step. Waits only while an earlier step is not committed. */
SHARDD_API shardd_status* shardd_step(shardd_job* job, const shardd_hyperparameters* groups, int32_t group_count,
                                      double max_grad_norm, const void* state, size_t state_bytes);
/* The same with all that a step can be told. Zero-initialise, set struct_size. */
typedef struct shardd_step_options {
  size_t struct_size;
  const shardd_hyperparameters* groups;
  int32_t group_count;
  double max_grad_norm; /* 0: not clipped, no norm; infinity: not clipped, but the norm is told */
  /* The gradients are those of the loss times this: divided out before norm and update. A gradient that is not finite
   * on any rank then skips the update on all (shardd_step_result.skipped); the step counts. 0: not scaled, not looked
   * at. */
  double loss_scale;
  const void* state;
  size_t state_bytes;
  /* Of the norm to clip by, torch.nn.utils.clip_grad_norm_'s: 1, 2, any number above 0, INFINITY. 0: 2. Over all
   * gradients of the job, each counted once, in double. */
  double norm_type;
  /* Several optimizers of one model (optimizer.groups with kinds of their own): groups, ascending, that this step
   * leaves as they are. Their gradients count in no norm, and stay until the step is committed. */
  const int32_t* left_groups;
  int32_t left_group_count;
  /* One of several optimizers has stepped, and the step goes on: the update is made, and shown when shardd_wait_step
   * returns, which has to come next. It is committed by a step without `part`, and taken back if the epoch ends before.
   * Until then nothing but steps and shardd_set_gradient_presence. */
  int32_t part;
} shardd_step_options;
SHARDD_API shardd_status* shardd_step_with(shardd_job* job, const shardd_step_options* options);
typedef struct shardd_step_result {
  size_t struct_size;
  int64_t committed_step;
  double grad_norm;   /* before clipping, after loss_scale; 0 when not asked for */
  double clip_factor; /* 1: not clipped */
  int32_t skipped;    /* loss_scale was given and a gradient of some rank is not finite: nothing was updated */
} shardd_step_result;
/* Until the last shardd_step is committed. Not needed between steps: the next unshard waits for it. [waits] */
SHARDD_API shardd_status* shardd_wait_step(shardd_job* job, shardd_step_result* result);
/* The same for the stream of shardd_set_cuda_stream: what is enqueued into it afterwards sees the step's version, and
 * the host does not wait. Without that stream, where 32 of its waits are outstanding, or where passes read copies of
 * what outlives the daemon, as shardd_wait_step. [waits then] */
SHARDD_API shardd_status* shardd_await_step(shardd_job* job);

/* Shards in place: for trainers that show their users shards, where all ranks of the job are on this node ------------
 */

/* The stored parameter, numel elements of its own dtype, read-only, at any time; the rank's shard of it is what
 * shardd_get_shard_range says (layout DIM0: whole rows). Of the rank's replica, where each has copies of its own
 * (JobConfig.replica_copies; likewise for gradients and states below). It changes at commits only: look at it after
 * shardd_wait_step or shardd_commit_parameters. Valid while attached. */
SHARDD_API const void* shardd_stored_parameter_data(const shardd_job* job, int32_t param);
/* What the backwards of this step have added up to, numel fp32 elements; NULL for a frozen parameter. It may be looked
 * at after shardd_wait_gradients, and the rank's gradient write range (shardd_get_shard_range) written (clipping,
 * unscaling) until the rank's next shardd_submit_gradients or shardd_step. Several replicas hold the same bytes, and
 * scaled by each of them they would be scaled too often, so write by that range, not by the gradient's. Where replicas
 * have copies, all write alike: the first replica's is what counts. Keeps its values until new gradients come, or
 * shardd_give_back_gradient. Valid while attached. */
SHARDD_API void* shardd_gradient_shard_data(const shardd_job* job, int32_t param);
/* Until every backward that this rank has closed is closed by all ranks and reduced. [waits] */
SHARDD_API shardd_status* shardd_wait_gradients(shardd_job* job);
/* The parameters of whose gradients this rank has given none, and others have, in the backwards of the running step
 * that it has closed since it called this last. Its shards of them hold the reduced gradients all the same. *params:
 * ascending, valid until the next call; some of them it may have given in another submission. After
 * shardd_wait_gradients (FAILED_PRECONDITION before). Asks the daemon only where that has said that there are some
 * [waits then, for the answer alone]; else costs two loads. A program calls it once before its first backward, too:
 * from then on a gradient whose mask `fresh` says that it replaces is added to what others gave in backwards that it
 * has not asked about, as where it looks at gradients after the last one only. None, with a daemon older than this
 * call. */
SHARDD_API shardd_status* shardd_given_by_others(shardd_job* job, const int32_t** params, int32_t* count);
/* Says of this rank's shard of a parameter's gradient, after shardd_wait_gradients and before the next backward or
 * step: present != 0: it holds a gradient, because the trainer has written it; 0: it holds none, the trainer has
 * dropped it (PyTorch's .grad = None). The last word counts; what is not spoken of is as the backwards have left it.
 * When the gradient is read next (by the step, or by a backward that adds to it): what some rank has is present, and
 * the shards of ranks that have none are set to zero; what no rank has is absent: no update, no decay, no step count.
 * After shardd_abandon_backward it is said of what was there before that backward: a gradient that has the first try of
 * it in its sum is dropped only if all ranks say so; one rank's 0 is without effect.
 * FAILED_PRECONDITION: frozen, a backward with gradients is open, the rank is entering a pass, or full parameters are
 * entered. Ranks that run groups in different orders can come to wait for each other, and gradients are then added
 * before their turn; all ranks get ABORTED where a rank speaks of such a gradient afterwards, or has spoken of it while
 * another rank is still in an earlier backward. Waits only while an earlier step is not committed. */
SHARDD_API shardd_status* shardd_set_gradient_presence(shardd_job* job, int32_t param, int present);
/* Nobody looks at this rank's shard of a parameter's gradient any more: its memory goes back to the system, whole pages
 * of it, and comes back as new gradients are added up, which costs about 1.7 us for each 4 KiB then. Worth it where
 * activations need the room meanwhile. Until then the shard reads zero. Between a step that is committed and the next
 * backward; FAILED_PRECONDITION: the running step has gradients, or full parameters are entered. Does nothing for a
 * frozen parameter, a small shard (below 128 KiB), one that several ranks hold, and on a GPU. Waits only while an
 * earlier step is not committed. */
SHARDD_API shardd_status* shardd_give_back_gradient(shardd_job* job, int32_t param);

/* No wait outlasts Ctrl-C: `interrupted` is called on the thread that waits, at least every 50 ms and in most waits as
 * soon as a signal handler has run on it, with no lock held. Non-zero ends the call with CANCELLED; the same call may
 * be made again and goes on waiting, but for shardd_detach, which has freed the job. It must not call this library. job
 * NULL: for all calls of this process that have none of their own job, shardd_attach among them; any thread may set it.
 * interrupted NULL: none. A host whose handler sets a flag gives a function that reads it. */
SHARDD_API shardd_status* shardd_set_interrupt(shardd_job* job, int (*interrupted)(void* context), void* context);

/* Jobs whose trainers write their shards (trainersNeverWrite false) --------------------------------------------------
 *
 * A pass is a forward with its backwards. Ranks enter it together, and nobody writes while anybody is inside.
 *
 * With an optimizer of the daemon, or none, on CPUs: a rank stores into a private view of the shards, with plain stores
 * or system calls of any thread, between passes. Nobody else sees that until shardd_enter_pass or shardd_step finds
 * what differs in the rank's write range, waits until no rank is inside a pass and hands it in; the job has it from
 * then on. Stores into other ranks' elements are dropped there. Stores inside a pass, inside of full parameters, or
 * between shardd_step and shardd_wait_step, make the call that ends that (stop_reading, leave, step, commit, wait, or
 * the next pass), and all calls after it, fail with FAILED_PRECONDITION and the parameter's name. shardd_hand_in_edits
 * hands in at once, for who reads others' elements where they lie. A rank that dies takes along what it has not handed
 * in.
 * shardd_attach: UNIMPLEMENTED where the process may not read /proc/self/pagemap; set passCopies there.
 * Over several nodes (JobConfig.nodes) it is the same, but for this: ranks of all nodes write what they have stored
 * back together, where shardd_enter_pass finds some on any of them (replicas: on the node, and the others must have
 * stored the same), or in shardd_hand_in_edits, which all ranks of all nodes call then, also those without edits.
 * shardd_step finds edits and fails with FAILED_PRECONDITION. What is stored behind the last pass or step before a
 * shardd_detach that says `finished` is dropped.
 *
 * With an optimizer in the trainers, on GPUs, and with JobConfig.passCopies (shardd_job_info.pass_copies says which),
 * passes read a copy of the shards instead, made where shardd_enter_pass lets the ranks in. Shards, and state of an
 * optimizer in the trainers, may then be stored into at any time, each rank its write range: from
 * shardd_commit_parameters (or attach, where there are values) on, but for
 * - the time in shardd_enter_pass: from the call to its return, or in the stream up to its wait,
 * - between shardd_enter_full_params and the return of shardd_leave_full_params, which then waits until all have left,
 * - between shardd_step and the commit it asks for (shardd_wait_step, shardd_await_step, or the next pass).
 * A store inside a pass is harmless to who reads, and counts from the next pass on. shardd_hand_in_edits returns at
 * once, and shardd_stop_reading and shardd_resume_reading look for nothing. Every shardd_enter_pass makes a version. As
 * no store is seen, an epoch that ends, whenever and for whatever reason, takes the job back to the copy that was kept,
 * with every JobConfig.keep_every-th pass: with 1, to where the current pass began (or to the last commit of the
 * daemon's optimizer, or of written values). Before it goes back, no rank may store any more: shardd_reattach, and
 * shardd_attach of a replacement, wait until the process of every other rank has attached again or has ended, and name
 * it while that lasts; attach with `replace` kills it. A rank without pass_copies that dies while it hands in takes the
 * job back in the same way. What was stored after the last shardd_enter_pass is no version: enter once more before
 * shardd_detach.
 */

/* Returns when every rank has called it. stepped != 0, equal on all ranks: what was
 * written is an optimizer step; it is committed, `state` (at most 1 MiB) with it, and the step count goes up. Else
 * `state`, where it is not empty, takes the place of the one committed last. UNIMPLEMENTED with either over several
 * nodes, beside an optimizer of the daemon's: give the state to shardd_step. [waits] */
SHARDD_API shardd_status* shardd_enter_pass(shardd_job* job, int stepped, const void* state, size_t state_bytes);
/* The rank reads no more until its next pass. shardd_step says so too. */
SHARDD_API shardd_status* shardd_leave_pass(shardd_job* job);
/* Inside a pass: the rank reads nothing until its next shardd_unshard or shardd_resume_reading, which may not come. For
 * a forward of which nobody knows whether it has a backward. From here on the rank may store, as after the pass: if no
 * backward comes, that counts from the next pass on. If one comes, its shardd_unshard or shardd_resume_reading fails
 * with FAILED_PRECONDITION and the parameter's name, and the rank has left the pass. Tells other ranks nothing: whoever
 * waits until this one has left goes on waiting. */
SHARDD_API shardd_status* shardd_stop_reading(shardd_job* job);
/* Inside a pass, perhaps after shardd_stop_reading: the rank reads again what it has kept unsharded. */
SHARDD_API shardd_status* shardd_resume_reading(shardd_job* job);
SHARDD_API int32_t shardd_inside_pass(const shardd_job* job); /* 1: yes */
/* *has_edits = 1: this rank has stored into its write range (shardd_get_shard_range), and has not handed that in.
 * Always 0 with pass_copies. FAILED_PRECONDITION where the rank reads in a pass, and inside of full parameters. */
SHARDD_API shardd_status* shardd_has_edits(shardd_job* job, int32_t* has_edits);
/* Leaves the pass of a rank that has stopped reading, if there is something to hand in; waits until no rank is inside a
 * pass, and hands in what this one has stored into its write range. Over several nodes: waits for the same call of all
 * ranks of all nodes, and makes a version. Nothing with pass_copies. FAILED_PRECONDITION where the rank reads in a
 * pass, and inside of full parameters. [waits] */
SHARDD_API shardd_status* shardd_hand_in_edits(shardd_job* job);
/* With an optimizer in the trainers: returns when this rank may store into state of its optimizer. Whoever has called
 * it once says that it calls it between any later shardd_enter_pass and the next such store, and after an error stores
 * nothing. If all ranks do, the daemon lets them into a pass before it has copied that state into the snapshot, and
 * copies while they compute. Shards may be stored into at any time, as before. Returns at once where no snapshot is
 * under way. [waits] */
SHARDD_API shardd_status* shardd_await_store(shardd_job* job);
/* on != 0: a store into what this process may only read (shards where trainers never write, what is unsharded on CPUs,
 * state of the daemon's optimizer) writes a line with the parameter's name to standard error before it ends the
 * process. A SIGSEGV handler does so, installed with the first call, which then calls the one before it. Nothing on a
 * GPU. */
SHARDD_API shardd_status* shardd_watch_writes(shardd_job* job, int on);
/* fp32 optimizer state `state` (0 ..) of the whole parameter, numel elements, or as many as Adafactor has of it;
 * read-only, but for an optimizer in the
 * trainers, each of which writes what belongs to its shard. NULL: no such state. Valid while attached. */
SHARDD_API void* shardd_optimizer_state_data(const shardd_job* job, int32_t param, int32_t state);

/* Full parameters, outside a pass, on all ranks together ----------------------------------------------------------- */

/* Where parameters are cut over nodes, no node has full ones: without writeback UNIMPLEMENTED. With it the ranks of all
 * nodes enter together and are given nothing (shardd_full_parameter_data is NULL): they write, each node's ranks at
 * least what they hold, of which the daemon keeps its node's part.
 * Returns when every rank has entered. RESOURCE_EXHAUSTED, on all ranks: the daemon's host has no memory for the old
 * values, which a writeback keeps until its commit; nobody is inside, and the job goes on as before. Over several nodes
 * the attempt ends with that on all of them, and names the node: attach again. [waits] */
SHARDD_API shardd_status* shardd_enter_full_params(shardd_job* job, int writeback);
/* The same with all that can be said; equal on all ranks. Zero-initialise, set struct_size, group and recurse. */
typedef struct shardd_full_params_options {
  size_t struct_size;
  int32_t group;          /* only what belongs to this group's module; -1: the whole model */
  int32_t recurse;        /* 1: and to modules beneath it. 0 without a group is refused */
  int32_t writeback;      /* shardd_write_parameter is allowed, shardd_commit_parameters has to follow on all ranks */
  int32_t rank0_only;     /* only rank 0 is given anything, and writes; what it wrote is everybody's after the commit */
  int32_t offload_to_cpu; /* given in host memory: on a CPU device it is anyway; on a GPU UNIMPLEMENTED,
                           * unless the job is offloaded */
  int32_t with_grads;     /* gradients too, as reduced so far; with writeback they may be written */
} shardd_full_params_options;
SHARDD_API shardd_status* shardd_enter_full_params_with(shardd_job* job, const shardd_full_params_options* options);
/* The stored parameter, numel elements of its own dtype, read-only. NULL outside enter .. leave, for a parameter that
 * was not asked for, and on the other ranks with rank0_only. What any rank writes shows at once on all: who edits what
 * others still copy enters twice, first without writeback. */
SHARDD_API const void* shardd_full_parameter_data(const shardd_job* job, int32_t param);
/* Its gradient, numel fp32 elements, read-only; NULL also without with_grads and where there is none. */
SHARDD_API const void* shardd_full_gradient_data(const shardd_job* job, int32_t param);
/* Writes elements [first, first + numel) of its gradient, fp32, before shardd_commit_parameters. One that was absent is
 * present afterwards, zero where nobody wrote. Unlike parameters it is there at once: gradients belong to the running
 * step and are dropped with it. [waits: for staging space] */
SHARDD_API shardd_status* shardd_write_gradient(shardd_job* job, int32_t param, const void* data, int64_t first,
                                                int64_t numel);
/* [waits, with passCopies: for the others to leave, because what they read may be stored into afterwards] */
SHARDD_API shardd_status* shardd_leave_full_params(shardd_job* job);

/* Introspection ---------------------------------------------------------------------------------------------------- */

/* What a spec comes to, before anything runs: JSON text with groups, and bytes by purpose of the node ("node") that
 * needs most. Free with shardd_string_free. */
SHARDD_API shardd_status* shardd_plan_json(const char* spec_json, char** json);
SHARDD_API void shardd_string_free(char* text);

/* What the daemon says of the job, shardd.v1.Job as JSON (names as in proto/shardd/v1/jobs.proto; 64-bit numbers are
 * strings): state, committed step, counters of the work it has done. Free with shardd_string_free. [waits: one call] */
SHARDD_API shardd_status* shardd_describe_job(shardd_job* job, char** json);

/* What the daemon says of itself, shardd.v1.Daemon as JSON likewise: its peer_address is what config.nodes has of its
 * node. `address`: as shardd_attach_options.address, but none is started: UNAVAILABLE where none listens. timeout_ms 0:
 * 300 000. Free with shardd_string_free. [waits: one call] */
SHARDD_API shardd_status* shardd_describe_daemon(const char* address, int64_t timeout_ms, char** json);

/* Of this attachment. */
typedef struct shardd_counters {
  size_t struct_size;
  uint64_t commands;  /* ring records written */
  uint64_t doorbells; /* of which woke the daemon */
  uint64_t waits;     /* waits that did not find their event already there */
  uint64_t wait_ns;   /* time in them */
} shardd_counters;
SHARDD_API shardd_status* shardd_get_counters(const shardd_job* job, shardd_counters* counters);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SHARDD_CLIENT_C_SHARDD_H_ */
