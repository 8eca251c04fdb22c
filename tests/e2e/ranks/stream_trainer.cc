#include "tests/e2e/ranks/stream_trainer.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "tests/e2e/ranks/attach.h"
#include "tests/e2e/ranks/bits.h"
#include "tests/e2e/ranks/precision.h"
#include "tests/e2e/ranks/step_limit.h"

namespace shardd::e2e {
namespace {

float Get(const std::string& dtype, const void* data, int i) {
  const auto* half = static_cast<const uint16_t*>(data);
  return dtype == "bf16" ? tensor::Bf16ToFloat(half[i]) : static_cast<const float*>(data)[i];
}

void Put(const std::string& dtype, void* data, int i, float value) {
  if (dtype == "bf16") {
    static_cast<uint16_t*>(data)[i] = tensor::FloatToBf16(value);
  } else {
    static_cast<float*>(data)[i] = value;
  }
}

size_t BytesOf(const std::string& dtype, int param) {
  return (dtype == "bf16" ? sizeof(uint16_t) : sizeof(float)) * static_cast<size_t>(kNumel[param]);
}

}  // namespace

StreamTrainer::StreamTrainer(const Args& args)
    : args_(args),
      moments_(args_),
      folder_(args_.Text("folder")),
      rank_(args_.Int("rank")),
      seen_(Zeros()),
      losses_(static_cast<size_t>(args_.Int("steps", 50)), 0.0) {
  for (int g = 0; g < kGroupCount; ++g) dtype_[g] = PrecisionOf(args_, kGroupNames[g]).param_dtype;
  report_.losses = report_.norms = report_.clips = losses_;
}

int StreamTrainer::Run() {
  Status status = Attach();
  while (status.ok()) {
    status = Train();
    if (status.code() == Code::kUnavailable && args_.Int("recover_gone") != 0) {
      const int64_t begin = NowMs();
      Synchronise();
      report_.AddNote("let_go " + std::to_string(NowMs() - begin));
      report_.AddNote("gone " + status.message());
      moments_.Reach("gone", job_->info().committed_step);
      status = ReattachTimed(*job_, &report_);
      continue;
    }
    if (!status.aborted() || args_.Int("recover") == 0) break;
    report_.AddNote("aborted " + std::to_string(job_->info().committed_step) + " " + std::to_string(NowMs()) + " " +
                    status.message());
    moments_.Reach("aborted", job_->info().committed_step);
    exec_ = nullptr;
    status = job_->Reattach();
  }
  report_.ended_ms = NowMs();
  if (!streams_.empty()) {
    Synchronise();
    report_.AddNote("drained " + std::to_string(NowMs() - report_.ended_ms));
  }
  report_.AddNote("captured " + std::to_string(captures_));
  report_.AddNote("refused " + refused_);
  report_.AddNote("looked " + std::to_string(worst_look_));
  report_.AddNote("peeked " + std::to_string(peeks_) + " " + std::to_string(different_));
  if (status.ok()) {
    if (args_.Int("bits") != 0) ReportBits(*job_, &report_);
    moments_.Reach("end", args_.Int("steps", 50));
    status = job_->Finish();
  }
  losses_.resize(static_cast<size_t>(args_.Int("steps", 50)));
  report_.losses = losses_;
  WriteReport(folder_, rank_, status, report_);
  return 0;
}

Status StreamTrainer::Attach() {
  RETURN_IF_ERROR(AttachAsTold(args_, &job_));
  for (int p = 0; p < kParamCount; ++p) param_[p] = job_->FindParameter(kParamNames[p]);
  for (int g = 0; g < kGroupCount; ++g) {
    group_[g] = job_->FindGroup(kGroupNames[g]);
    raf_[g] = job_->group(group_[g]).info().reshard_after_forward != 0;
  }
  gpu_ = std::make_unique<RankGpu>(job_->info().cuda_device);
  for (int p = 0; p < kParamCount; ++p) {
    in_[p] = gpu_->Pinned(sizeof(float) * kNumel[p]);
    out_[p] = gpu_->Pinned(sizeof(float) * kNumel[p]);
  }
  streams_.resize(static_cast<size_t>(args_.Int("streams", 1)));
  for (CUstream& stream : streams_) {
    if (args_.Int("legacy") != 0) break;  // null
    stream = gpu_->MakeStream();
  }
  RETURN_IF_ERROR(job_->SetCudaStream(streams_[current_]));
  report_.AddNote("ordered " + std::to_string(job_->info().stream_ordered));
  return Status();
}

Status StreamTrainer::Initialize() {
  const Values values = InitialValues();
  for (int p = rank_; p < kParamCount; p += job_->info().world_size) {
    RETURN_IF_ERROR(job_->WriteParameter(param_[p], values[p].data(), 0, kNumel[p]));
  }
  return job_->CommitParameters();
}

Status StreamTrainer::Train() {
  if (job_->info().version == 0) RETURN_IF_ERROR(Initialize());
  for (int64_t step = job_->info().committed_step; step < StepsToTrain(args_, step); ++step) {
    RETURN_IF_ERROR(TrainStep(step));
  }
  return job_->UnshardParams(false, [&] {
    for (int p = 0; p < kParamCount; ++p) {
      KernelOver(p, job_->full_parameter_data(param_[p]), job_->info().offloaded == 0, BytesOf("", p),
                 [this, p](const void* data) {
                   const auto* const values = static_cast<const float*>(data);
                   report_.values[p].assign(values, values + kNumel[p]);
                 });
    }
  });
}

Status StreamTrainer::TrainStep(int64_t step) {
  if (streams_.size() > 1) {
    current_ = static_cast<size_t>(step) % streams_.size();
    RETURN_IF_ERROR(job_->SetCudaStream(streams_[current_]));
  }
  const int micros = args_.Int("micro", 1);
  Kernel([this, step] { losses_[static_cast<size_t>(step)] = 0; });
  if (args_.Int("graph") != 0) RETURN_IF_ERROR(Launch(step));
  for (int micro = 0; micro < micros && args_.Int("graph") == 0; ++micro) {
    Status status = ForwardBackward(step, micro, micro + 1 == micros);
    if (status.code() == Code::kUnknown) {
      RETURN_IF_ERROR(job_->AbandonBackward());
      Kernel([this, step] { losses_[static_cast<size_t>(step)] = 0; });  // REQUIRES: micro 0
      status = ForwardBackward(step, micro, micro + 1 == micros);
    }
    RETURN_IF_ERROR(status);
  }
  if (args_.Int("look") != 0) RETURN_IF_ERROR(Look(step));
  const Hyper h = HyperOf(args_, 0);
  const shardd_hyperparameters group = ValuesOf(h);
  const std::string state = "step " + std::to_string(step + 1) + " rank " + std::to_string(rank_) + ";";
  moments_.Reach("before_step", step);
  shardd_step_options options = {};
  options.groups = &group;
  options.group_count = 1;
  options.max_grad_norm = args_.Double("max_norm");
  options.state = state.data();
  options.state_bytes = state.size();
  RETURN_IF_ERROR(job_->StepWith(options));
  moments_.Reach("step_sent", step);
  if (args_.Int("peek") != 0) RETURN_IF_ERROR(Peek());
  if (options.max_grad_norm > 0) {
    shardd_step_result result = {};
    result.struct_size = sizeof(result);
    RETURN_IF_ERROR(job_->WaitStep(&result));
    report_.norms[static_cast<size_t>(step)] = result.grad_norm;
    report_.clips[static_cast<size_t>(step)] = result.clip_factor;
    if (args_.Int("look") != 0) {
      Synchronise();
      worst_look_ = std::max(worst_look_, std::abs(looked_ - result.grad_norm) / result.grad_norm);
    }
  }
  return Status();
}

Status StreamTrainer::Peek() {
  RETURN_IF_ERROR(job_->AwaitStep());
  KernelOver(kW1, shardd_stored_parameter_data(job_->c_job(), param_[kW1]), job_->info().offloaded == 0,
             BytesOf("", kW1), [this](const void* of) {
               const auto* const values = static_cast<const float*>(of);
               peeked_.assign(values, values + kNumel[kW1]);
             });
  return Status();
}

Status StreamTrainer::Look(int64_t step) {
  RETURN_IF_ERROR(job_->WaitGradients());
  Kernel([this] { looked_ = 0; });
  for (int p = 0; p < kParamCount; ++p) {
    const void* const data = job_->gradient_shard_data(param_[p]);
    if (data == nullptr) continue;
    KernelOver(p, data, job_->info().offloaded == 0, BytesOf("", p), [this, p](const void* of) {
      const auto* const gradient = static_cast<const float*>(of);
      double sum = looked_ * looked_;
      for (int i = 0; i < kNumel[p]; ++i) sum += double{gradient[i]} * gradient[i];
      looked_ = std::sqrt(sum);
    });
  }
  moments_.Reach("looked", step);
  return Status();
}

Status StreamTrainer::Read(Backward* at, int group, shardd_phase phase) {
  RETURN_IF_ERROR(job_->group(group_[group]).Unshard(phase));
  for (int p = 0; p < kParamCount; ++p) {
    if (kGroupOfParam[p] != group && !(group == kHead && p == kEmbed)) continue;
    const void* const data = job_->parameter_data(param_[p]);
    if (data == nullptr) return Status(Code::kDataLoss, "no pointer of an unsharded parameter");
    const std::string& dtype = dtype_[kGroupOfParam[p]];
    KernelOver(p, data, true, BytesOf(dtype, p), [this, p, dtype](const void* values) {
      for (int i = 0; i < kNumel[p]; ++i) seen_[p][i] = Get(dtype, values, i);
    });
  }
  moments_.Reach(std::string("read_") + kGroupNames[group], at->step);
  return Status();
}

Status StreamTrainer::Submit(Backward* at, int group) {
  RETURN_IF_ERROR(job_->group(group_[group]).WaitGradientSlot());
  if (group == kMid && args_.Int("hang", -1) == at->step && !std::exchange(hung_, true)) {
    Kernel([go = folder_ + "/go.hang." + std::to_string(rank_)] {
      while (access(go.c_str(), F_OK) != 0) usleep(1000);
    });
  }
  for (int p = 0; p < kParamCount; ++p) {
    if (kGroupOfParam[p] != group || p == kFrozen) continue;
    Kernel([this, at, p, group] {
      for (int i = 0; i < kNumel[p]; ++i) Put(dtype_[group], out_[p], i, at->gradient[p][i]);
    });
    gpu_->Copy(streams_[current_], job_->gradient_data(param_[p]), out_[p], BytesOf(dtype_[group], p));
  }
  RETURN_IF_ERROR(job_->group(group_[group]).SubmitGradients());
  const std::string moment = std::string("submitted_") + kGroupNames[group];
  moments_.Reach(moment, at->step);
  return moments_.At("fail", moment, at->step) && !std::exchange(failed_, true)
             ? Status(Code::kUnknown, "user code failed")
             : Status();
}

Status StreamTrainer::ForwardBackward(int64_t step, int micro, bool last) {
  auto* const at = new Backward(rank_, step, micro);  // dropped by the last kernel; leaked after an error
  if (args_.Text("order").empty()) {
    RETURN_IF_ERROR(ForwardBackward(at, last));
  } else {
    RETURN_IF_ERROR(OutOfOrder(at));
    RETURN_IF_ERROR(job_->BackwardDone(last));
  }
  Kernel([at] { delete at; });
  return Status();
}

Status StreamTrainer::ForwardBackward(Backward* at, bool last) {
  Pass* const pass = &at->pass;
  Values* const g = &at->gradient;
  RETURN_IF_ERROR(Read(at, kRoot, SHARDD_FORWARD));
  RETURN_IF_ERROR(Read(at, kEmbedGroup, SHARDD_FORWARD));
  Kernel([this, pass] { pass->ForwardEmbed(seen_[kEmbed]); });
  if (raf_[kEmbedGroup]) RETURN_IF_ERROR(Release(kEmbedGroup));
  RETURN_IF_ERROR(Read(at, kMid, SHARDD_FORWARD));
  Kernel([this] {
    if (peeked_.empty()) return;
    ++peeks_;
    different_ += peeked_ == seen_[kW1] ? 0 : 1;
    peeked_.clear();
  });
  Kernel([this, pass] { pass->ForwardMid(seen_[kW1], seen_[kB1], seen_[kFrozen], seen_[kW2]); });
  if (raf_[kMid]) RETURN_IF_ERROR(Release(kMid));
  RETURN_IF_ERROR(Read(at, kHead, SHARDD_FORWARD));
  Kernel([this, pass] { pass->ForwardHead(seen_[kEmbed], seen_[kU]); });
  if (raf_[kHead]) RETURN_IF_ERROR(Release(kHead));
  Kernel([this, pass, at, micros = std::max(1, args_.Int("micro", 1))] {
    losses_[static_cast<size_t>(at->step)] += pass->Loss(seen_[kBias], seen_[kGain]) / micros;
  });
  if (raf_[kRoot]) {
    RETURN_IF_ERROR(Release(kRoot));
    RETURN_IF_ERROR(Read(at, kRoot, SHARDD_BACKWARD));
  }
  Kernel([this, pass, g] { pass->BackwardRoot(seen_[kGain], *g); });
  if (raf_[kHead]) RETURN_IF_ERROR(Read(at, kHead, SHARDD_BACKWARD));
  Kernel([this, pass, g] { pass->BackwardHead(seen_[kEmbed], seen_[kU], *g); });
  RETURN_IF_ERROR(Submit(at, kHead));
  RETURN_IF_ERROR(Release(kHead));
  if (raf_[kMid]) RETURN_IF_ERROR(Read(at, kMid, SHARDD_BACKWARD));
  Kernel([this, pass, g] { pass->BackwardMid(seen_[kW1], seen_[kFrozen], seen_[kW2], *g); });
  RETURN_IF_ERROR(Submit(at, kMid));
  RETURN_IF_ERROR(Release(kMid));
  if (raf_[kEmbedGroup]) RETURN_IF_ERROR(Read(at, kEmbedGroup, SHARDD_BACKWARD));
  Kernel([pass, g] { pass->BackwardEmbed(*g); });
  RETURN_IF_ERROR(Submit(at, kEmbedGroup));
  RETURN_IF_ERROR(Release(kEmbedGroup));
  RETURN_IF_ERROR(Submit(at, kRoot));
  RETURN_IF_ERROR(Release(kRoot));
  return job_->BackwardDone(last);
}

// With the groups one after the other in the order given, whatever depends on what.
Status StreamTrainer::OutOfOrder(Backward* at) {
  const std::vector<int> order = ParseOrder(args_.Text("order"));
  for (int group : order) {
    RETURN_IF_ERROR(Read(at, group, SHARDD_FORWARD));
    RETURN_IF_ERROR(Release(group));
  }
  Kernel([this, at, micros = std::max(1, args_.Int("micro", 1))] {
    Pass& pass = at->pass;
    pass.ForwardEmbed(seen_[kEmbed]);
    pass.ForwardMid(seen_[kW1], seen_[kB1], seen_[kFrozen], seen_[kW2]);
    pass.ForwardHead(seen_[kEmbed], seen_[kU]);
    losses_[static_cast<size_t>(at->step)] += pass.Loss(seen_[kBias], seen_[kGain]) / micros;
    pass.BackwardRoot(seen_[kGain], at->gradient);
    pass.BackwardHead(seen_[kEmbed], seen_[kU], at->gradient);
    pass.BackwardMid(seen_[kW1], seen_[kFrozen], seen_[kW2], at->gradient);
    pass.BackwardEmbed(at->gradient);
  });
  for (int group : order) {
    RETURN_IF_ERROR(Read(at, group, SHARDD_BACKWARD));
    RETURN_IF_ERROR(Release(group));
    RETURN_IF_ERROR(Submit(at, group));
  }
  return Status();
}

void StreamTrainer::Kernel(std::function<void()> body) {
  if (capturing_) {
    bodies_.push_back(std::make_unique<std::function<void()>>(std::move(body)));
    gpu_->Launch(
        streams_[current_], [](void* of) { (*static_cast<std::function<void()>*>(of))(); }, bodies_.back().get());
    return;
  }
  const auto run = [](void* boxed) {
    auto* const body = static_cast<std::function<void()>*>(boxed);
    (*body)();
    delete body;
  };
  gpu_->Launch(streams_[current_], run, new std::function<void()>(std::move(body)));
}

void StreamTrainer::KernelOver(int param, const void* data, bool on_gpu, size_t size_bytes,
                               std::function<void(const void*)> body) {
  if (on_gpu) gpu_->Copy(streams_[current_], in_[param], data, size_bytes);
  Kernel([body = std::move(body), from = on_gpu ? in_[param] : data] { body(from); });
}

void StreamTrainer::Synchronise() {
  for (CUstream stream : streams_) gpu_->Synchronise(stream);
}

}  // namespace shardd::e2e
