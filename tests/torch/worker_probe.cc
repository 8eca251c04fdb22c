// Looks at a sharded module instead of training it.

#include <functional>
#include <memory>
#include <set>

#include "tests/torch/worker_step.h"

namespace shardd_test {

using Json = nlohmann::json;

// What the module's tensors are outside and inside a forward.
shardd::Status Probe(const WorkerOptions& options) {
  auto net = std::make_shared<NetImpl>(options.model);
  const at::Tensor before = net->cells[1]->b->weight;
  std::unique_ptr<shardd::ShardedModule> sharded;
  shardd::Status status = shardd::ShardedModule::Shard(net, MakeShardOptions(options, *net), &sharded);
  if (!status.ok()) {
    return status;
  }
  net->sharded = sharded.get();
  Json result;
  const auto attempt = [&](const char* what, const std::function<void()>& body) {
    try {
      body();
      result["raised"][what] = "";
    } catch (const std::exception& error) {
      result["raised"][what] = error.what();
    }
  };
  const at::Tensor view = net->cells[1]->b->weight.t();
  attempt("add", [&] { (void)(net->cells[1]->b->weight + 1); });
  attempt("matmul of a view", [&] { (void)at::mm(at::ones({2, view.size(0)}), view); });
  attempt("item", [&] { (void)net->in->bias[0].item<float>(); });
  attempt("clone", [&] { (void)net->cells[1]->b->weight.clone(); });
  attempt("forward without Run", [&] { (void)net->cells[1]->forward(at::ones({2, 15}), true); });
  result["same tensor"] = before.is_same(net->cells[1]->b->weight);
  std::set<const void*> storages;
  for (const auto& parameter : net->named_parameters()) {
    const at::Tensor& tensor = parameter.value();
    result["exact size"][parameter.key()] =
        tensor.storage().nbytes() == tensor.nbytes() && tensor.storage_offset() == 0;
    storages.insert(tensor.storage().unsafeGetStorageImpl());
  }
  result["storages"] = storages.size();
  result["parameters"] = net->named_parameters().size();
  // After a whole step everything is closed again, .grad was never used, and a graph of before a Reattach is dead.
  status = shardd::ShardedModule::Try([&] {
    (void)RunStep(options, 0, *net, sharded.get());
    sharded->Step({Hyper(options, 0, 0)});
  });
  if (!status.ok() || !(status = sharded->WaitStep()).ok()) {
    return status;
  }
  attempt("add after a step", [&] { (void)(net->cells[1]->b->weight + 1); });
  bool any_grad = false;
  for (const at::Tensor& parameter : net->parameters()) {
    any_grad = any_grad || parameter.grad().defined();
  }
  result["any grad"] = any_grad;
  // A graph that survives the module finds an end.
  const Batch batch = MakeBatch({}, at::kFloat);
  at::Tensor loss = sharded->Run(*net, batch.x, batch.index, batch.target, Position());
  if (!(status = sharded->Finish()).ok()) {
    return status;
  }
  attempt("backward after finish", [&] { loss.backward(); });
  sharded.reset();
  attempt("backward without module", [&] { loss.backward(); });
  attempt("add after finish", [&] { (void)(net->cells[1]->b->weight + 1); });
  loss = at::Tensor();
  WriteJson(options.out, result);
  return status;
}

// What Shard refuses, as "code text", and that it leaves the module as it was.
shardd::Status Refusals(const WorkerOptions& options) {
  Json result;
  std::unique_ptr<shardd::ShardedModule> sharded;
  int job = 0;
  const auto attempt = [&](const char* what, const std::shared_ptr<torch::nn::Module>& module,
                           const std::function<void(shardd::ShardOptions*)>& change) {
    shardd::ShardOptions shard;
    if (module != nullptr) {
      shard = MakeShardOptions(options, *module);
    }
    shard.job_name += "_refused" + std::to_string(job++);
    change(&shard);
    std::unique_ptr<shardd::ShardedModule> refused;
    const shardd::Status status = shardd::ShardedModule::Shard(module, shard, &refused);
    result["refused"][what] = std::to_string(static_cast<int>(status.code())) + " " + status.message();
    return status.ok();
  };
  const auto nothing = [](shardd::ShardOptions*) {};
  auto net = std::make_shared<NetImpl>(options.model);
  attempt("null", nullptr, nothing);
  attempt("unknown", net, [](shardd::ShardOptions* shard) { shard->ignored = {"cell7"}; });
  attempt("twice", net, [](shardd::ShardOptions* shard) { shard->ignored = shard->replicate = {"cell1"}; });
  attempt("root", net, [](shardd::ShardOptions* shard) { shard->ignored = {""}; });
  attempt("tied", net, [](shardd::ShardOptions* shard) { shard->ignored = {"cell0"}; });
  attempt("cut of nothing", net, [](shardd::ShardOptions* shard) { shard->post_forward_shard_size = {{"cell7", 1}}; });
  attempt("reshard of nothing", net, [](shardd::ShardOptions* shard) {
    shard->reshard_after_forward = {{"cell7", true}};
  });
  attempt("cut of a part", net, [](shardd::ShardOptions* shard) { shard->post_forward_shard_size = {{"cell0.a", 1}}; });
  attempt("name that is no text", net, [](shardd::ShardOptions* shard) { shard->job_name = "\xff\xfe"; });
  auto sparse = std::make_shared<torch::nn::Module>();
  sparse->register_parameter("weight", at::zeros({3, 4}).to_sparse(), /*requires_grad=*/false);
  attempt("sparse", sparse, nothing);
  result["still usable"] = net->cells[0]->b->weight.sum().item<float>() != 0;

  shardd::Status status = shardd::ShardedModule::Shard(net, MakeShardOptions(options, *net), &sharded);
  if (!status.ok()) {
    return status;
  }
  attempt("again", net, nothing);
  attempt("a part of it", net->cells[1], nothing);
  auto around = std::make_shared<torch::nn::Module>();
  around->register_module("inner", net);
  attempt("around it", around, nothing);
  // The refused ones have not touched it.
  net->sharded = sharded.get();
  status = shardd::ShardedModule::Try([&] { (void)RunStep(options, 0, *net, sharded.get()); });
  if (!status.ok() || !(status = sharded->Finish()).ok()) {
    return status;
  }
  attempt("after finish", net, nothing);
  sharded.reset();
  attempt("after its end", net, nothing);
  WriteJson(options.out, result);
  return status;
}

}  // namespace shardd_test
