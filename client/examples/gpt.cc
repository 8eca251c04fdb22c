// Trains a GPT-style character model on the licenses of this machine, through shardd: start it once per rank (RANK,
// WORLD_SIZE). A rank that is killed is replaced by starting it again; it goes on at the last committed step by itself.
// deploy/quickstart.sh shows all of it.

#include <ATen/Parallel.h>
#include <malloc.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <numbers>
#include <optional>
#include <string>
#include <vector>

#include "client/examples/gpt/data.h"
#include "client/examples/gpt/flags.h"
#include "client/examples/gpt/model.h"
#include "client/examples/gpt/report.h"

namespace {

constexpr int64_t kWarmupSteps = 20;
constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.95;
constexpr double kEpsilon = 1e-8;

// A pure function of the step, as everything that a replacement has to know.
double LearningRate(const gpt::Flags& flags, int64_t step) {
  if (step < kWarmupSteps) {
    return flags.lr * static_cast<double>(step + 1) / kWarmupSteps;
  }
  const double done =
      static_cast<double>(step - kWarmupSteps) / static_cast<double>(std::max<int64_t>(flags.steps - kWarmupSteps, 1));
  return flags.lr * (0.55 + 0.45 * std::cos(std::numbers::pi * std::min(done, 1.0)));
}

struct Tensors {
  at::Tensor inputs;
  at::Tensor targets;
};
Tensors MakeTensors(const gpt::Flags& flags, const std::string& text, int64_t rank, int64_t index) {
  gpt::Batch batch = gpt::MakeBatch(text, flags.batch, flags.context, static_cast<uint64_t>(flags.seed), rank, index);
  const auto make = [&](std::vector<int64_t>& values) {
    return at::from_blob(values.data(), {flags.batch, flags.context}, at::kLong).clone();
  };
  return {make(batch.inputs), make(batch.targets)};
}

gpt::Gpt MakeModel(const gpt::Flags& flags) {
  gpt::Gpt model(gpt::kVocabulary, flags.layers, flags.width, flags.heads, flags.context);
  model->Initialize(static_cast<uint64_t>(flags.seed));
  return model;
}

void PrintSample(const gpt::Flags& flags, gpt::GptImpl& model) {
  if (flags.sample > 0 && flags.rank == 0) {
    const std::string text =
        gpt::Generate(model, flags.prompt, flags.sample, flags.context, static_cast<uint64_t>(flags.seed));
    std::printf("sample: %s%s\n", flags.prompt.c_str(), text.c_str());
  }
}

double TokensPerStep(const gpt::Flags& flags) {
  return static_cast<double>(flags.batch * flags.accumulate * flags.context * flags.ranks);
}

shardd::ShardOptions MakeOptions(const gpt::Flags& flags) {
  shardd::ShardOptions options;
  options.job_name = flags.job;
  options.world_size = static_cast<int>(flags.ranks);
  options.rank = static_cast<int>(flags.rank);
  options.address = flags.address;
  options.replace = true;  // whoever starts this rank again wants the new one
  options.fully_shard_classes = {"Block"};
  options.strategy = flags.strategy == "no_shard"        ? shardd::Strategy::kNoShard
                     : flags.strategy == "shard_grad_op" ? shardd::Strategy::kShardGradOp
                                                         : shardd::Strategy::kFullShard;
  options.layout = flags.layout == "dim0" ? shardd::ShardLayout::kDim0 : shardd::ShardLayout::kFlat;
  if (flags.dtype == "bf16") {
    options.mixed_precision.param_dtype = at::kBFloat16;
  }
  return options;
}

// The trainer's own state rides on each step. Data and learning rate are functions of the step, so the step is all of
// it.
std::string StateAfter(const gpt::Flags& flags, int64_t step) {
  return "step=" + std::to_string(step + 1) + " seed=" + std::to_string(flags.seed);
}
shardd::Status CheckState(const gpt::Flags& flags, shardd::Job& job) {
  const int64_t step = job.info().committed_step;
  const std::string want = StateAfter(flags, step - 1);
  if (step > 0 && job.trainer_state() != want) {
    return {shardd::Code::kFailedPrecondition,
            "resume: trainer state is of another run (got \"" + job.trainer_state() + "\", want \"" + want + "\")"};
  }
  return {};
}

// One optimizer step of this rank: its loss.
double TrainStep(const gpt::Flags& flags, const std::string& text, int64_t step, gpt::GptImpl& model,
                 shardd::ShardedModule* sharded) {
  double loss_sum = 0;
  for (int64_t micro = 0; micro < flags.accumulate; ++micro) {
    const Tensors batch = MakeTensors(flags, text, flags.rank, step * flags.accumulate + micro);
    const at::Tensor loss = sharded->Run(model, batch.inputs, batch.targets) / static_cast<double>(flags.accumulate);
    loss_sum += loss.item<double>();
    sharded->Backward(loss, /*last=*/micro + 1 == flags.accumulate);
  }
  shardd_hyperparameters hyper{};
  hyper.lr = LearningRate(flags, step);
  hyper.weight_decay = flags.weight_decay;
  hyper.beta1 = kBeta1;
  hyper.beta2 = kBeta2;
  hyper.eps = kEpsilon;
  sharded->Step({hyper}, flags.clip, StateAfter(flags, step));
  return loss_sum;
}

shardd::Status TrainSharded(const gpt::Flags& flags, const std::string& text, gpt::Report* report) {
  gpt::Gpt model = MakeModel(flags);
  std::unique_ptr<shardd::ShardedModule> sharded;
  shardd::Status status = shardd::ShardedModule::Shard(model.ptr(), MakeOptions(flags), &sharded);
  if (!status.ok()) {
    return status;
  }
  model->sharded = sharded.get();
  int64_t step = sharded->job().info().committed_step;
  report->Event("attached", step);
  if (!(status = CheckState(flags, sharded->job())).ok()) {
    return status;
  }
  while (step < flags.steps) {
    const double start = gpt::Now();
    std::optional<double> loss;  // once the step has been asked for
    shardd_step_result result{};
    result.struct_size = sizeof(result);
    status = shardd::ShardedModule::Try([&] { loss = TrainStep(flags, text, step, *model, sharded.get()); });
    if (status.ok()) {
      status = sharded->WaitStep(&result);
    }
    int64_t committed = step + 1;
    if (status.aborted()) {
      report->Event("aborted", step, status.message());
      if (!(status = sharded->Reattach()).ok() || !(status = CheckState(flags, sharded->job())).ok()) {
        return status;
      }
      committed = sharded->job().info().committed_step;
      report->Event("reattached", committed);
    }
    if (!status.ok()) {
      return status;
    }
    // A step that was decided when the other rank died has been committed all the same.
    if (committed > step && loss.has_value()) {
      report->Step(flags.rank, committed, *loss, result.grad_norm, TokensPerStep(flags) / (gpt::Now() - start));
    }
    step = committed;
  }
  PrintSample(flags, *model);
  report->Event("finished", step);
  return sharded->Finish();
}

// What a step costs without optimizer, daemon and other ranks; tests/bench/gpt_overhead.py compares with it.
void TrainFloor(const gpt::Flags& flags, const std::string& text, gpt::Report* report) {
  gpt::Gpt model = MakeModel(flags);
  for (int64_t step = 0; step < flags.steps; ++step) {
    const double start = gpt::Now();
    double loss_sum = 0;
    for (int64_t micro = 0; micro < flags.accumulate; ++micro) {
      const Tensors batch = MakeTensors(flags, text, flags.rank, step * flags.accumulate + micro);
      const at::Tensor loss = model->forward(batch.inputs, batch.targets) / static_cast<double>(flags.accumulate);
      loss_sum += loss.item<double>();
      loss.backward();
    }
    model->zero_grad();
    report->Step(flags.rank, step + 1, loss_sum, 0, TokensPerStep(flags) / (gpt::Now() - start));
  }
}

// What the sharded run must equal: one process, no daemon, the gradients of all ranks' batches averaged.
void TrainReference(const gpt::Flags& flags, const std::string& text, gpt::Report* report) {
  gpt::Gpt model = MakeModel(flags);
  torch::optim::AdamW optimizer(
      model->parameters(),
      torch::optim::AdamWOptions(flags.lr).betas({kBeta1, kBeta2}).eps(kEpsilon).weight_decay(flags.weight_decay));
  for (int64_t step = 0; step < flags.steps; ++step) {
    const double start = gpt::Now();
    std::vector<double> losses(static_cast<size_t>(flags.ranks), 0);
    for (int64_t rank = 0; rank < flags.ranks; ++rank) {
      for (int64_t micro = 0; micro < flags.accumulate; ++micro) {
        const Tensors batch = MakeTensors(flags, text, rank, step * flags.accumulate + micro);
        const at::Tensor loss = model->forward(batch.inputs, batch.targets) / static_cast<double>(flags.accumulate);
        losses[static_cast<size_t>(rank)] += loss.item<double>();
        (loss / static_cast<double>(flags.ranks)).backward();
      }
    }
    double norm = 0;
    if (flags.clip > 0) {
      norm = torch::nn::utils::clip_grad_norm_(model->parameters(), flags.clip);
    }
    static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).lr(LearningRate(flags, step));
    optimizer.step();
    optimizer.zero_grad();
    const double tokens_per_s = TokensPerStep(flags) / (gpt::Now() - start);
    for (int64_t rank = 0; rank < flags.ranks; ++rank) {
      report->Step(rank, step + 1, losses[static_cast<size_t>(rank)], norm, tokens_per_s);
    }
  }
  PrintSample(flags, *model);
}

}  // namespace

int main(int argc, char** argv) {
  gpt::Flags flags;
  int exit_code = 0;
  if (!gpt::ParseFlags(argc, argv, &flags, &exit_code)) {
    return exit_code;
  }
  // A step frees what it allocated, all modes alike. By default glibc gives the end of the heap back each time and the
  // kernel clears the same pages again in the next layer: a few percent of a step. 32 MiB is the most glibc takes.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  at::set_num_threads(static_cast<int>(flags.threads));
  const std::string text = gpt::LoadText(flags.text);
  if (text.size() < static_cast<size_t>(flags.context) + 2) {
    std::fprintf(stderr, "gpt: text \"%s\": too short (got %zu characters, want more than %" PRId64 ")\n",
                 flags.text.empty() ? "/usr/share/common-licenses" : flags.text.c_str(), text.size(),
                 flags.context + 1);
    return 2;
  }
  gpt::Report report(flags.out, flags.rank, flags.log_every);
  if (!report.ok()) {
    std::fprintf(stderr, "gpt: --out: cannot append to \"%s\"\n", flags.out.c_str());
    return 2;
  }
  if (flags.reference || flags.floor) {
    (flags.reference ? TrainReference : TrainFloor)(flags, text, &report);
    return 0;
  }
  const shardd::Status status = TrainSharded(flags, text, &report);
  if (!status.ok()) {
    std::fprintf(stderr, "gpt: rank %" PRId64 ": %s\n", flags.rank, status.message().c_str());
    return 1;
  }
  return 0;
}
