#ifndef SHARDD_CLIENT_TORCH_ADAPTOR_H_
#define SHARDD_CLIENT_TORCH_ADAPTOR_H_

// Fully sharded training for libtorch trainers in C++. A training loop:
//
//   auto model = std::make_shared<GptImpl>(...);
//   ShardOptions options;
//   options.job_name = "gpt";
//   options.fully_shard_classes = {"Block"};
//   std::unique_ptr<ShardedModule> sharded;
//   Status status = ShardedModule::Shard(model, options, &sharded);       // parameters live in the daemon from here on
//   for (int64_t step = sharded->job().info().committed_step; step < steps;) {
//     status = sharded->Try([&] {
//       at::Tensor loss = sharded->Run(*model, Batch(rank, step));  // model->forward runs each block with Run, too
//       sharded->Backward(loss);
//       sharded->Step({hyperparameters}, /*max_grad_norm=*/1.0, State(step));
//     });
//     if (status.aborted()) {                                              // a rank died; nothing committed is lost
//       status = sharded->Reattach();
//       step = sharded->job().info().committed_step;
//     } else { ++step; }
//   }
//
// libtorch has no module hooks, so every fully sharded module is run by Run(): it unshards the module's parameter
// group, calls forward, reshards, and puts into the autograd graph what unshards it again for backward, takes the
// gradients and reshards. Parameters keep their identity: the module's tensors are the same objects, with contents
// while their group is unsharded, and raise an error that names the group otherwise. They are read-only and have no
// .grad: gradients go to the rank's gradient slot, each with one copy, and the daemon's optimizer updates.
//
// A module that is run again in a backward (activation recomputation: the backward of a torch::autograd::Function calls
// Run with gradients enabled, and then torch::autograd::backward) stays unsharded until its own backward has ended.
// After torch::autograd::grad with create_graph, modules that were in it stay unsharded until the backward of its
// result, or BackwardDone; after that they are unsharded for it again.
// Not supported: changing requires_grad after Shard.
// Errors: torch code is exception code, so Run, Backward, BackwardDone and Step throw StatusError; Try turns that into
// its Status. Everything else returns Status and throws nothing.
// Interrupts: every wait in here ends with CANCELLED when the host says so (Job::SetProcessInterrupt). A pass that
// ended so is not taken up again: the trainer ends, and its replacement goes on at the committed step.
// Threads: as a shardd_job, one thread at a time; the backward of CPU tensors runs on the calling thread.

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "client/cpp/shardd.h"
#include "client/torch/options.h"
#include "client/torch/sharded_state.h"

namespace shardd {

class ShardedModule {
 public:
  // Describes `module`, opens or joins the job, attaches the rank, gives the parameters their first values (rank 0's,
  // when the job has none yet) and re-homes them. Blocks until every rank has come this far the first time. After an
  // error the module is unchanged. FAILED_PRECONDITION: a parameter is sharded already, by this or another
  // ShardedModule, also by one that is finished. INVALID_ARGUMENT: options that do not fit the module.
  static Status Shard(std::shared_ptr<torch::nn::Module> module, const ShardOptions& options,
                      std::unique_ptr<ShardedModule>* sharded);
  // Detaches; the job is kept for its grace time.
  ~ShardedModule();
  ShardedModule(const ShardedModule&) = delete;
  ShardedModule& operator=(const ShardedModule&) = delete;

  // module.forward(args...), with the group of `module` unsharded. A module that is not a fully sharded module is
  // simply run. Results that are Tensor, std::vector<Tensor>, std::tuple or std::pair of these can be run backward.
  template <typename M, typename... Args>
  auto Run(M& module, Args&&... args);

  // loss.backward() and BackwardDone(last).
  void Backward(const at::Tensor& loss, bool last = true);
  // After backward calls of the trainer's own: submits what is left, reshards everything, closes this backward. `last`:
  // a step follows, else the next micro-batch's gradients are added.
  void BackwardDone(bool last = true);
  // Asks for the optimizer step: one entry per optimizer group. `trainer_state` (at most 1 MiB) is committed with it.
  // Does not wait; what is wrong with it shows in the next call.
  void Step(const std::vector<shardd_hyperparameters>& groups, double max_grad_norm = 0,
            const std::string& trainer_state = "");
  // With all that a step can be told (loss scale, other norms): see shardd.h. struct_size is set here.
  void StepWith(const shardd_step_options& options);

  // OK, or the Status of the StatusError that `body` threw. Other exceptions pass through.
  static Status Try(const std::function<void()>& body);

  // After an exception of user code in a forward or backward, in the same session and without the other ranks: all is
  // resharded, graphs made since the last BackwardDone are dead, and the backward can be done again. What became of
  // gradients that were submitted already: shardd_abandon_backward in shardd.h.
  Status AbandonBackward() { return state_->AbandonBackward(); }

  // Until the last step is committed.
  Status WaitStep(shardd_step_result* result = nullptr) { return state_->job()->WaitStep(result); }
  // After ABORTED or UNAVAILABLE: attaches again and re-homes every storage. Graphs made before are dead: running them
  // backward is an error. Rewind to job().info().committed_step and job().trainer_state().
  Status Reattach();
  // This rank needs the job no more.
  Status Finish();

  // The stored parameters, as (FQN, copy in the stored dtype), in plan order: the managed part of a state dict. A tied
  // parameter comes under each of its names, with one copy for all of them. All ranks together, outside a pass.
  // UNIMPLEMENTED where they are cut over nodes and computed with in another dtype, or gathered in float8: no node has
  // the stored values.
  Status CopyFullParameters(std::vector<std::pair<std::string, at::Tensor>>* parameters);

  struct FullParameter {
    std::string fqn;
    at::Tensor value;  // a copy in the stored dtype
    at::Tensor grad;   // with_grads: a copy in fp32 of what is reduced so far; undefined: none
  };
  struct FullParamsOptions {
    std::string module;           // FQN of a fully sharded module; empty: the whole model
    bool recurse = true;          // with a module: those beneath it too
    bool writeback = true;        // what `body` leaves in values and grads becomes everybody's
    bool rank0_only = false;      // only rank 0 is given parameters; what it leaves is written back whole. Of each
                                  // node, which have to edit alike; not where parameters are cut over nodes
    bool offload_to_cpu = false;  // copies are in host memory either way
    bool with_grads = false;      // not where parameters are cut over nodes
  };
  // Runs `body` with full parameters, in plan order, each once under its own name; on other ranks with rank0_only
  // with none. All ranks together, outside forward and backward. What `body` leaves is written when all ranks have run
  // it; without rank0_only each rank writes an equal part of every parameter, so edits have to be the same on all
  // ranks. What `body` throws passes through, and nothing is written; the other ranks then wait for this one's edit.
  Status UnshardParams(const FullParamsOptions& options, const std::function<void(std::vector<FullParameter>&)>& body);

  // REQUIRES: Finish has not been called.
  Job& job() { return *state_->job(); }

 private:
  static Status DoShard(std::shared_ptr<torch::nn::Module> module, const ShardOptions& options,
                        std::unique_ptr<ShardedModule>* sharded);
  ShardedModule(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<internal::ShardedState> state);
  // The group whose fully sharded module this is; -1: none.
  int32_t GroupOf(const torch::nn::Module* module) const;
  // REQUIRES: group >= 0. Replaces inputs that require gradients.
  std::shared_ptr<internal::Use> Begin(int32_t group, const std::vector<at::Tensor*>& inputs);
  void End(const std::shared_ptr<internal::Use>& use, const std::vector<at::Tensor>& outputs);
  void Abandon(internal::Use* use);
  bool IsCutOverNodes();
  // Copies by index in the plan, undefined for what is not of `module` (empty: the whole model), one group unsharded at
  // a time.
  Status CopyByGroups(const std::string& module, bool recurse, std::vector<at::Tensor>* copies);

  template <typename T>
  static void CollectTensors(T& value, std::vector<at::Tensor*>* tensors);

  const std::shared_ptr<torch::nn::Module> module_;
  const std::shared_ptr<internal::ShardedState> state_;
  std::unordered_map<const torch::nn::Module*, int32_t> groups_;
};

template <typename T>
void ShardedModule::CollectTensors(T& value, std::vector<at::Tensor*>* tensors) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    tensors->push_back(&value);
  } else if constexpr (std::is_same_v<T, std::vector<at::Tensor>>) {
    for (at::Tensor& tensor : value) {
      tensors->push_back(&tensor);
    }
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&](auto&... items) { (CollectTensors(items, tensors), ...); }, value);
  }
}

template <typename M, typename... Args>
auto ShardedModule::Run(M& module, Args&&... args) {
  const int32_t group = GroupOf(&module);
  if (group < 0) {
    return module.forward(std::forward<Args>(args)...);
  }
  std::tuple<std::decay_t<Args>...> values(std::forward<Args>(args)...);
  std::vector<at::Tensor*> inputs;
  CollectTensors(values, &inputs);
  std::shared_ptr<internal::Use> use = Begin(group, inputs);
  try {
    auto result = std::apply([&](auto&... items) { return module.forward(std::move(items)...); }, values);
    std::vector<at::Tensor*> results;
    CollectTensors(result, &results);
    std::vector<at::Tensor> outputs;
    for (const at::Tensor* tensor : results) {
      outputs.push_back(*tensor);
    }
    End(use, outputs);
    return result;
  } catch (...) {
    Abandon(use.get());
    throw;
  }
}

}  // namespace shardd

#endif  // SHARDD_CLIENT_TORCH_ADAPTOR_H_
