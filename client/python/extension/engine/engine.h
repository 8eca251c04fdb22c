#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_ENGINE_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_ENGINE_H_

// One registered root module: its job, its units (unit.h), and what happens once per forward and once per backward.
//
//   RootPreForward   the first unit that runs is the root of this forward; what an exception left over is cleared
//   QueueFinal       (first unit whose backward begins) asks autograd for FinalCallback
//   FinalCallback    units that autograd has not ended are ended; what is left is submitted; the backward is closed;
//                    when all ranks have closed it, gradients are shown on the sharded parameters
//
// Threads: one at a time, as a shardd_job; members that are Python objects need the GIL.

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/shardd.h"
#include "client/fsdp/group_lives.h"
#include "client/python/extension/engine/shell.h"

namespace shardd::python {

class Unit;

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // Releases the GIL while it waits; signal handlers run. Raises what the library refuses. `resumes`: a holder of the
  // rank is replaced, and the job is taken as it is where it trains more than the spec says. `gpu`: the GPU that the
  // model is on, as torch numbers them, which must be the rank's in the daemon; -1: the host.
  // `node`: which of the spec's this one is, with ranks of its own.
  // `alone`: nobody but processes of this launcher knows the job.
  static std::shared_ptr<Engine> Attach(const std::string& spec_json, int rank, int node, const std::string& address,
                                        bool resumes, int64_t timeout_ms, int gpu, bool alone);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  // Units in the order of the module tree, each with its groups. Called once, before any of them runs.
  void AddUnit(Unit* unit);
  void RemoveUnit(const Unit* unit);

  // Gives the elements of `rows` to the job, from element `first` of parameter `param` on. Before version 1 and in a
  // write.
  void Write(int param, const at::Tensor& rows, int64_t first);
  // The same for fp32 state of the daemon's optimizer, and for the number of updates that it has made.
  void WriteOptimizerState(int param, int state, const at::Tensor& rows, int64_t first);
  void WriteUpdateCount(int param, int64_t count);
  void Commit();

  // Full parameters (full_params.cc). All ranks enter together, outside of forward and backward; until they
  // leave nothing can be unsharded. With `writeback` the values that Write and WriteGradient give become everybody's
  // with Commit.
  void EnterFullParams(const Job::FullParams& options);
  void LeaveFullParams();
  bool full_params() const { return full_params_; }
  // FAILED_PRECONDITION while they are entered.
  void CheckOutsideFullParams(const char* what) const;
  // A forward of this model, or a backward of any, is under way on this thread.
  bool in_forward_backward() const;
  // The whole parameter as stored, or its gradient in fp32, into `out`, which is contiguous and has its size and dtype.
  // False: this rank is not given it, or it has no gradient. REQUIRES: entered.
  bool CopyFullParameter(int param, at::Tensor out);
  bool CopyFullGradient(int param, at::Tensor out);
  void WriteGradient(int param, const at::Tensor& rows, int64_t first);
  // What `.grad` says is what the job has, before it is read: gradients that the program gave or dropped.
  void SettleGradients();
  // `.grad` shows what the job has, because it was written there.
  void TakeGradient(int param);
  // This rank has submitted a gradient of it for the next step, whether or not it shows one.
  bool HasGradient(int param) const;
  // From here on the memory of gradients that a step has used goes back to the system where a forward begins and
  // nobody shows or holds them, and comes back in backward. It costs time, so it is for models whose gradients are
  // many.
  void SetGivesGradientsBack(bool gives_back) {
    gives_back_ = gives_back;
    gradients_used_ = true;  // they are allocated with the job
  }
  // Points every unit's storages to the job's memory: after registration and after Reattach.
  void LoadMemory();

  // `local` (this rank's rows of parameter `param`, alone in its storage) lies in the job's memory for state `state`
  // from now on; `copy_in`: with the values it has, in a write window. RESOURCE_EXHAUSTED: the job has no such state.
  void AdoptState(int param, int state, const at::Tensor& local, bool copy_in);
  // Element p of `counts`, fp32, is how many updates parameter p has had; kept up with every step.
  void SetUpdateCounts(at::Tensor counts) { update_counts_ = std::move(counts); }
  // The daemon's optimizer has these parameters and no others.
  void SetUpdated(const std::vector<int>& params);

  struct StepResult {
    int64_t committed_step = 0;
    double grad_norm = 0;
    double clip_factor = 1;
    bool skipped = false;
  };
  // The optimizer step: gives everything back, asks, waits for the commit; on a GPU the current stream does that, and
  // the result is empty, unless it tells of a norm or of a loss scale. `options.state` is set from `state`.
  StepResult Step(shardd_step_options options, const std::string& state);
  // After ABORTED or UNAVAILABLE: the same rank in the current epoch. Graphs of before are dead.
  void Reattach();
  // What the program trains is not what the job was made for: a parameter has been unfrozen that it has no gradient
  // memory for, or AskExtension was called.
  bool WantsExtension() const;
  void AskExtension() { extension_asked_ = true; }
  // With all ranks; between commits. True: another job has taken this one's place. Detach, and attach to that one.
  bool Extend(const std::string& spec_json);
  // In a forked child: parameters and gradients raise where they are used, instead of reading what is not mapped.
  void LoseMemory();
  // The units are as before registration. The session stays until Detach: other ranks may be in the middle of a pass.
  void Release();
  // Nothing of the job can be used afterwards; sharded parameters keep their values here.
  void Detach(bool finished);
  // As Detach, after Release, on a thread that is there for it: its waits for other ranks go on whatever this process
  // does meanwhile.
  void FinishApart();
  std::string Describe();
  std::string trainer_state();
  shardd_job_info info();
  // The host waits for the last step's commit, too, where the stream alone has: raises what went wrong in it. What
  // tells of the job does so.
  void WaitForCommit();
  shardd_counters client_counters();
  int FindParam(const std::string& fqn);
  int FindGroup(const std::string& name);

  // From here on a store into what this process may only read names its parameter before it ends the process.
  void WatchWrites();
  // Ranks enter passes together from here on, and parameters may be stored into between them, or, with
  // JobConfig.pass_copies, at any time. A pass begins with the root's forward and ends with its backward, or with the
  // forward where there is none.
  void UsePasses();
  // Hands in what was stored, when no rank is in a pass. With copies for passes it waits for nobody, and stores are in
  // the order of the current stream with what the job does.
  void OpenWindow();
  // What was written becomes the next version now, with all ranks, and a marked step is committed.
  void CloseWindow();
  // What was written since the last pass is an optimizer step: it is committed where the next pass begins, with
  // `state`.
  void MarkStepped(std::string state);
  // What the program has done to sharded parameters otherwise than by storing into them (`p.data = ...`, another object
  // in a module) goes into the shards now, in a write window. Nothing where it has not, and inside full parameters.
  // Raises, before anything is taken, what cannot be.
  void TakeChanges();
  // `root`: a weakref to the model's root.
  void SetRoot(pybind11::object root) { root_ = std::move(root); }
  // While what this returns lives, no collector takes the model, its units and the job apart: of another thread, in a
  // wait that holds no GIL, or of this one, in a hook of the program's. Null: the model is gone. REQUIRES: the GIL is
  // held; where it is let go it need not be.
  std::shared_ptr<PyObject> KeepModel() const;
  // `replaced(before, now)` is called when `now` has taken a parameter's place.
  void SetReplaced(pybind11::object replaced) { replaced_ = std::move(replaced); }
  // `state` takes the place of what was committed last, with what was written, where the next pass begins.
  void MarkState(std::string state);

  // Drops the forward or backward that an exception ended.
  void ResetIteration();
  // `complete(output)` is called with the root's output, and gives what takes its place; after a backward with `...`.
  // None: nothing to do.
  void SetCompletePartial(pybind11::object complete) { complete_partial_ = std::move(complete); }

  // From units.
  // True: a forward begins.
  bool RootPreForward(Unit* unit);
  // An unshard outside of forward and backward is a pass of its own, until the unit is resharded by hand or a forward
  // takes it over.
  void EnterPassByHand(bool backward);
  bool paused() const { return paused_; }
  void LeavePassByHand();
  // The root's output ends the forward: units of which only some modules ran are ended with it.
  pybind11::object EndForward(const Unit* unit, pybind11::object output, bool has_backward);
  // An exception ended the forward that the unit began, if it is still under way.
  void ForwardFailed(const Unit* unit);
  bool IsRoot(const Unit* unit) const { return !units_.empty() && units_.front() == unit; }
  void QueueFinal();
  bool final_queued() const { return final_queued_; }
  // From a unit whose backward ends though none has begun: of a list of modules only some ran, by themselves. Their
  // gradients are shown where this backward ends; the forward of the whole model, if there was one, keeps its own.
  void QueuePartialFinal();
  void set_whole_backward() { partial_backward_ = false; }
  // Of all units, by the daemon's numbers.
  fsdp::GroupLives& groups() { return groups_; }
  const fsdp::GroupLives& groups() const { return groups_; }
  // In the order of this thread's current stream, on a GPU.
  Job& job();
  // What the job has offloaded is there for the host, too: of a GPU's stream that waits for it. REQUIRES: the GIL is
  // held.
  void AwaitHostState() const;
  // Until the GPU has run what torch's current stream has; raises where that takes longer than a wait of the job may.
  // REQUIRES: the GIL is held; it is not while this waits.
  void SynchroniseStream() const;
  // What is computed on.
  at::Device device() const { return device_; }
  // Where shards, reduced gradients and optimizer state lie.
  at::Device state_device() const { return state_device_; }
  // Of the attachment; a graph made under another is dead.
  uint64_t generation() const { return generation_; }
  int64_t steps() const { return steps_; }
  uint64_t NextBackward() { return ++backwards_; }
  // Everything that is waited for at an unshard is known to be there.
  bool settled() const { return settled_; }
  void set_settled() { settled_ = true; }
  bool alive() const { return job_ != nullptr && !released_; }
  bool has_memory() const { return job_ != nullptr && !lost_; }

 private:
  Engine(std::unique_ptr<Job> job, at::Device device);
  // Raises where the rank's device is not the model's.
  static void CheckDevice(const shardd_job_info& info, int gpu);
  void FollowStream();
  Job& session();  // as job(), in no stream's order: for what enqueues nothing
  void FinalCallback(uint64_t generation);
  void EndUnits(bool partial);
  void EnterPass();
  bool AnyUnsharded() const;
  // The whole model is evaluated at full precision, out of the shards and not their copies: no rank may store into them
  // before all have read, whether a backward follows or not. Where only some units are, the reduced gradients, which a
  // step waits for, come after every rank's forward.
  bool ReadsShardsAlone() const;
  void LeavePass();
  // LeavePass; where the pass has read shards in the place of copies, no rank stores into them before all are done.
  void EndPass();
  void WaitForWindow();
  void ReleaseUnits();
  void PausePass();
  void CheckBetweenPasses(const char* what);
  void ReshardAll();
  void GiveGradientsBack();
  bool CopyOut(int param, const void* data, at::Tensor& out);

  std::unique_ptr<Job> job_;  // null once detached
  const at::Device device_;   // what is computed on
  at::Device state_device_ = at::kCPU;
  std::optional<c10::Stream> stream_;  // of a GPU, whose order the job knows
  std::chrono::milliseconds stream_limit_{};
  std::vector<Unit*> units_;  // the root's first
  pybind11::object complete_partial_ = pybind11::none();
  pybind11::object replaced_ = pybind11::none();
  pybind11::object root_ = pybind11::none();  // a weakref
  Unit* forward_root_ = nullptr;
  bool final_queued_ = false;
  bool partial_backward_ = false;  // of what is queued
  bool passes_ = false;
  bool copies_ = false;       // for passes: JobConfig.pass_copies
  bool written_ = false;      // with copies: since the forward of a pass that is paused
  bool inside_pass_ = false;  // or was until edits between a forward and its backward ended it: see PausePass
  bool paused_ = false;       // inside: between a forward and what may be its backward
  bool pass_by_hand_ = false;
  bool stepped_ = false;
  std::string stepped_state_;
  bool settled_ = false;
  bool full_params_ = false;
  bool lost_ = false;  // in a forked child
  bool released_ = false;
  bool extension_asked_ = false;
  bool gives_back_ = false;
  bool awaited_ = false;         // the last step's commit, by the stream alone
  bool gradients_used_ = false;  // by the daemon's last step or by none, and none came since
  uint64_t generation_ = 1;
  uint64_t backwards_ = 0;  // of units
  int64_t steps_ = 0;
  at::Tensor update_counts_;
  EngineShell shell_;
  fsdp::GroupLives groups_;
};

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_ENGINE_H_
