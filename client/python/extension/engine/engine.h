#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_ENGINE_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_ENGINE_H_

// One registered root module: its job, its units (unit.h), and what happens once per forward and once per backward.
//
//   RootPreForward   the first unit that runs is the root of this forward; what an exception left over is cleared
//   QueueFinal       (first unit whose backward begins) asks autograd for FinalCallback
//   FinalCallback    units that autograd has not ended are ended; what is left is submitted; the backward is closed;
//                    when all ranks have closed it, gradients are shown on the sharded parameters
//
// Where the rank is in that, in which pass, and what it holds of each group is in client/fsdp; this is what the three
// mean for torch's modules and tensors.
//
// Threads: one at a time, as a shardd_job; members that are Python objects need the GIL.

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/shardd.h"
#include "client/fsdp/group_lives.h"
#include "client/fsdp/iteration.h"
#include "client/fsdp/passes.h"
#include "client/python/extension/engine/attached_job.h"
#include "client/python/extension/engine/program.h"
#include "client/python/extension/engine/shell.h"
#include "client/python/extension/engine/used_gradients.h"

namespace shardd::python {

class ManagedParam;
class Unit;

// Parts of a step are made, and not committed: what commits it without another update.
struct OpenStep {
  std::vector<shardd_hyperparameters> groups;
  std::string state;

  // Calls `step`, once, with the options of a step that leaves all groups as they are.
  template <typename Step>
  auto Close(Step&& step) const {
    std::vector<int32_t> left(groups.size());
    std::iota(left.begin(), left.end(), 0);
    shardd_step_options options{};
    options.groups = groups.data();
    options.group_count = static_cast<int32_t>(groups.size());
    options.left_groups = left.data();
    options.left_group_count = options.group_count;
    options.state = state.data();
    options.state_bytes = state.size();
    return step(options);
  }
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  explicit Engine(std::unique_ptr<AttachedJob> attached);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  // Units in the order of the module tree, each with its groups. Called once, before any of them runs.
  void AddUnit(Unit* unit);
  void RemoveUnit(const Unit* unit);
  const std::vector<Unit*>& units() const { return units_; }  // the root's first
  // By the daemon's number; null: in no unit.
  std::shared_ptr<ManagedParam> FindManaged(int param) const;
  // Points every unit's storages to the job's memory: after registration and after Reattach.
  void LoadMemory();

  AttachedJob& attached() { return *attached_; }
  // In the order of this thread's current stream, on a GPU.
  Job& job() { return attached_->job(); }
  Program& program() { return program_; }
  std::shared_ptr<PyObject> KeepModel() const { return program_.KeepModel(); }  // while a call of Python's is in here
  UsedGradients& used_gradients() { return used_gradients_; }
  // Of all units, by the daemon's numbers.
  fsdp::GroupLives& groups() { return groups_; }
  const fsdp::GroupLives& groups() const { return groups_; }
  fsdp::Iteration& iteration() { return iteration_; }
  fsdp::Passes& passes() { return passes_; }

  // Full parameters (full_params.cc). All ranks enter together, outside of forward and backward; until they
  // leave nothing can be unsharded. With `writeback` the values that are written become everybody's with Commit.
  // `of_shards`: nothing is entered at the daemon, which has no full parameters where they are cut over nodes: the
  // program gathers what ranks hold of the committed version, and may do nothing else meanwhile.
  void EnterFullParams(const Job::FullParams& options, bool of_shards);
  void LeaveFullParams();
  bool full_params() const { return full_params_; }
  // FAILED_PRECONDITION while they are entered.
  void CheckOutsideFullParams(const char* what) const;
  // A forward of this model, or a backward of any, is under way on this thread.
  bool in_forward_backward() const;

  // Element p of `counts`, fp32, is how many updates parameter p has had; kept up with every step.
  void SetUpdateCounts(at::Tensor counts) { update_counts_ = std::move(counts); }
  // The optimizer step: gives everything back, asks, and waits as AttachedJob::Step. `options.state` is set from
  // `state`.
  AttachedJob::StepResult Step(shardd_step_options options, const std::string& state);
  // The pass that was entered has committed a step of an optimizer of torch's.
  void StepCommitted();
  int64_t steps() const { return steps_; }
  // After ABORTED or UNAVAILABLE: the same rank in the current epoch. Graphs of before are dead.
  void Reattach();
  // Where a forward begins: attaches again if the daemon has stopped for another one behind this rank's last step, of
  // which the program hears nothing then.
  void FollowDaemon();
  // The same where a pass is entered with a step of the program's own optimizer. True: it has, and the step is
  // committed.
  bool FollowInPass();
  // What the program trains is not what the job was made for: a parameter has been unfrozen that it has no gradient
  // memory for, or AskExtension was called.
  bool WantsExtension() const;
  void AskExtension() { extension_asked_ = true; }
  // With all ranks; between commits. True: another job has taken this one's place. Detach, and attach to that one.
  bool Extend(const std::string& spec_json);

  // The end (end.cc). In a forked child: parameters and gradients raise where they are used, instead of reading what is
  // not mapped.
  void LoseMemory();
  // The units are as before registration. The session stays until Detach: other ranks may be in the middle of a pass.
  void Release();
  // Nothing of the job can be used afterwards; sharded parameters keep their values here.
  void Detach(bool finished);
  // As Detach, after Release, on a thread that is there for it: its waits for other ranks go on whatever this process
  // does meanwhile.
  void FinishApart();
  bool alive() const { return attached_->open() && !released_; }
  bool has_memory() const { return attached_->open() && !lost_; }

  // What the program stores (passes.cc). Leaves the pass of a forward that had no backward. With copies for passes
  // stores are in the order of the current stream with what the job does. Waits for no rank.
  void BeginWriting();
  // What was written becomes the next version now, with all ranks, and a marked step is committed.
  void CommitWriting();
  // What the program has done to sharded parameters otherwise than by storing into them (`p.data = ...`, another object
  // in a module) goes into the shards now. Nothing where it has not, and inside full parameters.
  // Raises, before anything is taken, what cannot be.
  void TakeChanges();
  // An unshard outside of forward and backward is a pass of its own, until the unit is resharded by hand or a forward
  // takes it over.
  void EnterPassByHand(bool backward);
  void LeavePassByHand();
  void ReshardAll();

  // From units (iteration.cc).
  // True: a forward begins.
  bool RootPreForward(Unit* unit);
  // The root's output ends the forward: units of which only some modules ran are ended with it.
  pybind11::object EndForward(const Unit* unit, pybind11::object output, bool has_backward);
  // An exception ended the forward that the unit began, if it is still under way.
  void ForwardFailed(const Unit* unit);
  // The backward of a unit begins; see Iteration::BeginBackward. Gradients of a part are shown where it ends.
  void QueueFinal(bool whole);
  // Drops the forward or backward that an exception ended.
  void ResetIteration();
  bool IsRoot(const Unit* unit) const { return !units_.empty() && units_.front() == unit; }

 private:
  friend void CloseStep(Engine& engine);
  friend bool StepIsOpen(const Engine& engine);
  friend void LeaveToExit(Engine& engine, std::string name, std::vector<std::string> notes);  // at_exit.h
  // A new session, at whatever daemon is there, and its memory.
  void MapAgain(bool keeps_gradients);
  // Raises DATA_LOSS where the next daemon does not go on at the step that `before` tells of.
  void CheckGoesOn(const shardd_job_info& before) const;
  void FinalCallback(uint64_t generation);
  void EndUnits(bool partial);
  bool AnyUnsharded() const;
  void LeaveToWrite();
  void CheckBetweenPasses(const char* what);
  void ReleaseUnits();

  const std::unique_ptr<AttachedJob> attached_;
  std::vector<Unit*> units_;
  Program program_;
  EngineShell shell_;
  fsdp::GroupLives groups_;
  fsdp::Iteration iteration_;
  fsdp::Passes passes_;
  UsedGradients used_gradients_;
  bool full_params_ = false;
  bool of_shards_ = false;  // of these
  bool lost_ = false;       // in a forked child
  bool released_ = false;
  bool extension_asked_ = false;
  bool forward_since_step_ = false;  // one whose graph the program may hold
  std::unique_ptr<OpenStep> open_step_;
  int64_t steps_ = 0;
  at::Tensor update_counts_;
};

// Commits a step of which parts are made (shardd_step_options.part), and that goes on no more. Waits for all ranks.
void CloseStep(Engine& engine);
bool StepIsOpen(const Engine& engine);

// Waits, with pass copies, until state of an optimizer may be stored into (shardd_await_store).
void AwaitStore(Engine& engine);

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_ENGINE_H_
