#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_ATTACHED_JOB_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_ATTACHED_JOB_H_

// The job of an engine. On a GPU its work is in the order of torch's current stream.

#include <ATen/ATen.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "client/cpp/shardd.h"

namespace shardd::python {

// Owns the attachment, which stream the job follows, and what of it this process has waited for. Every function raises
// what the library refuses; those that wait need the GIL and hold it no longer while they do. Thread-compatible, as a
// shardd_job.
class AttachedJob {
 public:
  // Releases the GIL while it waits; signal handlers run. `resumes`: a holder of the rank is replaced, and the job is
  // taken as it is where it trains more than the spec says. `gpu`: the GPU that the model is on, as torch numbers them,
  // which must be the rank's in the daemon; -1: the host. `node`: which of the spec's this one is, with ranks of its
  // own. `alone`: nobody but processes of this launcher knows the job.
  static std::unique_ptr<AttachedJob> Attach(const std::string& spec_json, int rank, int node,
                                             const std::string& address, bool resumes, int64_t timeout_ms, int gpu,
                                             bool alone);
  AttachedJob(const AttachedJob&) = delete;
  AttachedJob& operator=(const AttachedJob&) = delete;

  // In the order of this thread's current stream, on a GPU.
  Job& job();
  // In no stream's order: for what enqueues nothing.
  Job& unordered();
  bool open() const { return job_ != nullptr; }
  // The job is whoever's has it now; this one is closed.
  std::unique_ptr<Job> Take() { return std::move(job_); }
  void Reattach();

  // What is computed on, and where shards, reduced gradients and optimizer state lie.
  at::Device device() const { return device_; }
  at::Device state_device() const { return state_device_; }
  void FollowStream();
  // What the job has offloaded is there for the host, too: of a GPU's stream that waits for it.
  void AwaitHostState() const;
  // Until the GPU has run what torch's current stream has; raises where that takes longer than a wait of the job may.
  void SynchroniseStream() const;
  // Everything that is waited for at an unshard is known to be there.
  bool settled() const { return settled_; }
  void set_settled() { settled_ = true; }
  // A pass was entered: the host's stores are in no stream's order, and a stream may be behind the copies for passes.
  void AwaitPassCopies();

  struct StepResult {
    int64_t committed_step = 0;
    double grad_norm = 0;
    double clip_factor = 1;
    bool skipped = false;
  };
  // Asks for the optimizer step and waits for the commit; on a GPU the current stream does that, and the result is
  // empty, unless it tells of a norm or of a loss scale. `sent` is called behind the asking, without the GIL: the step
  // will be made, whether this waits to its end or a signal's handler raises meanwhile.
  StepResult Step(
      const shardd_step_options& options, const std::function<void()>& sent = [] {});
  // The host waits for the last step's commit, too, where the stream alone has. What tells of the job does so.
  void WaitForCommit();
  std::string Describe();
  std::string trainer_state();
  shardd_job_info info();
  shardd_counters client_counters();

 private:
  AttachedJob(std::unique_ptr<Job> job, at::Device device, std::chrono::milliseconds stream_limit);
  // Raises where the rank's device is not the model's.
  static void CheckDevice(const shardd_job_info& info, int gpu);

  std::unique_ptr<Job> job_;  // null once taken
  const at::Device device_;
  const at::Device state_device_;
  const std::chrono::milliseconds stream_limit_;
  std::optional<c10::Stream> stream_;  // of a GPU, whose order the job knows
  bool settled_ = false;
  bool awaited_ = false;  // the last step's commit, by the stream alone
};

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_ATTACHED_JOB_H_
