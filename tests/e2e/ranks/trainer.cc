#include "tests/e2e/ranks/trainer.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "tests/e2e/ranks/attach.h"
#include "tests/e2e/ranks/bits.h"
#include "tests/e2e/ranks/precision.h"
#include "tests/e2e/ranks/step_limit.h"
#include "tests/e2e/reference.h"

namespace shardd::e2e {

Trainer::Trainer(const Args& args)
    : args_(args),
      moments_(args_),
      folder_(args_.Text("folder")),
      rank_(args.Int("rank")),
      data_rank_(args.Int("first_rank") + rank_),
      seen_(Zeros()),
      gradient_(Zeros()) {
  for (int g = 0; g < kGroupCount; ++g) dtype_[g] = PrecisionOf(args_, kGroupNames[g]).param_dtype;
  const int steps = args_.Int("steps", 50);
  report_.losses.assign(steps, 0.0);
  report_.norms.assign(steps, 0.0);
  report_.clips.assign(steps, 0.0);
  order_ = ParseOrder(args_.Text("order"));
}

int Trainer::Run() {
  Status status = Attach();
  while (status.ok()) {
    status = Train();
    const bool gone = status.code() == Code::kUnavailable && args_.Int("outlive_daemon") != 0;
    if (!gone && (!status.aborted() || args_.Int("recover") == 0)) {
      break;
    }
    report_.AddNote("aborted " + std::to_string(job_->info().committed_step) + " " + std::to_string(NowMs()) + " " +
                    status.message());
    if (job_->info().lost_nothing == 0) report_.AddNote("lost a step");
    moments_.Reach("aborted", job_->info().committed_step);
    status = ReattachTimed(*job_, &report_);
    if (!status.ok()) {
      break;
    }
    LookWhere();
    report_.AddNote("state " + job_->trainer_state().substr(0, 64));
  }
  if (status.ok()) {
    status = Finish();
  }
  report_.ended_ms = NowMs();
  moments_.Reach("ended", 0);  // still attached, where it did not finish
  WriteReport(folder_, rank_, status, report_);
  return 0;
}

void Trainer::LookWhere() {
  const shardd_job_info info = job_->info();
  unsharded_.Use(info.cuda_device);
  state_.Use(info.offloaded != 0 ? -1 : info.cuda_device);
}

Status Trainer::Attach() {
  RETURN_IF_ERROR(AttachAsTold(args_, &job_));
  LookWhere();
  for (int p = 0; p < kParamCount; ++p) {
    param_[p] = job_->FindParameter(kParamNames[p]);
  }
  for (int g = 0; g < kGroupCount; ++g) {
    group_[g] = job_->FindGroup(kGroupNames[g]);
    raf_[g] = job_->group(group_[g]).info().reshard_after_forward != 0;
  }
  report_.AddNote("attached " + std::to_string(job_->info().committed_step));
  if (!job_->trainer_state().empty()) {
    report_.AddNote("state " + job_->trainer_state().substr(0, 64));
  }
  if (args_.Int("orphan") != 0 && fork() == 0) {
    // Holds sockets and descriptors of its parent until the test ends it (its process group).
    while (true) pause();
  }
  return Status();
}

Status Trainer::Initialize() {
  Values values = InitialValues();
  for (int p = 0; p < kParamCount; ++p) {
    if (kParamNames[p] == args_.Text("odd_initial")) values[p].back() += 1;
  }
  const int world = job_->info().world_size;
  for (int p = rank_; p < kParamCount; p += world) {  // together, each its part
    const int half = kNumel[p] / 2;
    RETURN_IF_ERROR(job_->WriteParameter(param_[p], values[p].data(), 0, half));
    moments_.Reach("initial", 0);
    RETURN_IF_ERROR(job_->WriteParameter(param_[p], values[p].data() + half, half, kNumel[p] - half));
  }
  return job_->CommitParameters();
}

Status Trainer::Train() {
  if (job_->info().version == 0) {
    RETURN_IF_ERROR(Initialize());
  }
  const int64_t first = job_->info().committed_step;
  const std::string want = "step " + std::to_string(first) + " rank " + std::to_string(rank_) + ";";
  const std::string state = job_->trainer_state();
  // "of_any_rank": the state of this node went with its daemon, and a replica's came.
  if (first > 0 && args_.Int("of_any_rank") == 0 && state.compare(0, want.size(), want) != 0) {
    return Status(Code::kDataLoss, "trainer state is of another step (got " + state.substr(0, 64) + ", want " + want);
  }
  if (LoadsBefore(first) && first < StepsToTrain(args_, first)) RETURN_IF_ERROR(CheckLoadIsWhole(first));
  for (int64_t step = first; step < StepsToTrain(args_, step); ++step) {
    if (LoadsBefore(step)) RETURN_IF_ERROR(args_.Int("edits") != 0 ? Edit(step) : Load(step));
    RETURN_IF_ERROR(TrainStep(step));
    report_.stepped_ms.push_back(static_cast<double>(NowMs()));
  }
  const int steps = args_.Int("steps", 50);
  if (first < steps) {
    RETURN_IF_ERROR(job_->WaitStep());
  }
  if (args_.Int("writeback_at_end") != 0 || !Odd("odd_writeback", steps).empty()) {
    Status written = Writeback(steps);
    if (written.code() == Code::kResourceExhausted && args_.Int("writeback_again") != 0) {
      report_.AddNote("refused " + written.message());
      moments_.Reach("refused", steps);
      written = Writeback(steps);
    }
    RETURN_IF_ERROR(written);
  }
  if (args_.Int("read_values", 1) == 0) {
    return Status();
  }
  const std::string strategy = args_.Text("strategy");
  const bool is_cut = !args_.Text("nodes").empty() && (strategy == "FULL_SHARD" || strategy == "SHARD_GRAD_OP" ||
                                                       args_.Int("group_size") > args_.Int("world"));
  if (is_cut && args_.Int("full_params_at_end") == 0) {
    return ReadUnsharded();
  }
  return job_->UnshardParams(false, [&] {
    moments_.Reach("reading", steps);
    for (int p = 0; p < kParamCount; ++p) {
      report_.values[p].resize(static_cast<size_t>(kNumel[p]));
      state_.Read(report_.values[p].data(), job_->full_parameter_data(param_[p]), sizeof(float) * kNumel[p]);
    }
  });
}

// Where they are cut over nodes there are no full parameters but by the way of a pass.
Status Trainer::ReadUnsharded() {
  moments_.Reach("reading", args_.Int("steps", 50));
  RETURN_IF_ERROR(InPass(args_.Int("steps", 50), [&] {
    for (int group = 0; group < kGroupCount; ++group) {
      RETURN_IF_ERROR(ReadGroup(group, SHARDD_FORWARD, /*hold=*/false));
    }
    return Status();
  }));
  for (int p = 0; p < kParamCount; ++p) report_.values[p] = seen_[p];
  return Status();
}

// Adds one to every element of mid.b1 (each rank its part, or rank 0 all of it) as a commit of its own.
Status Trainer::Writeback(int64_t step) {
  Status inner;
  Job::FullParams options;
  options.writeback = true;
  options.rank0_only = args_.Int("rank0_only") != 0;
  options.group = options.rank0_only ? group_[kMid] : -1;
  Status status = job_->UnshardParams(options, [&] {
    moments_.Reach("full_params", step);
    const void* const full = job_->full_parameter_data(param_[kB1]);
    if (full == nullptr) {
      return;
    }
    float data[kNumel[kB1]];
    state_.Read(data, full, sizeof(data));
    const int parts = options.rank0_only ? 1 : job_->info().world_size;
    for (int i = rank_; i < kNumel[kB1] && inner.ok(); i += parts) {
      const float value = data[i] + 1;
      inner = job_->WriteParameter(param_[kB1], &value, i, 1);
      moments_.Reach("writeback", step);
    }
    if (args_.Int("write_filler") == 0 || !inner.ok()) return;
    const std::vector<float> zeros(static_cast<size_t>(args_.Int("filler")));
    inner = job_->WriteParameter(job_->FindParameter("mid.filler"), zeros.data(), 0, args_.Int("filler"));
    moments_.Reach("filler_written", step);
  });
  return inner.ok() ? status : inner;
}

Status Trainer::TrainStep(int64_t step) {
  const int micros = args_.Int("micro", 1);
  report_.losses[step] = 0;
  for (int micro = 0; micro < micros; ++micro) {
    const double loss = report_.losses[step];
    Status status = InPass(step, [&] { return ForwardBackward(step, micro, micro + 1 == micros); });
    if (status.code() == Code::kUnknown) {
      RETURN_IF_ERROR(job_->AbandonBackward());
      moments_.Reach("abandoned", step);
      report_.losses[step] = loss;
      status = ForwardBackward(step, micro, micro + 1 == micros);
    }
    RETURN_IF_ERROR(status);
  }
  std::vector<shardd_hyperparameters> groups;
  const bool muon = args_.Int("muon") != 0, adafactor = args_.Int("adafactor") != 0;
  const bool several = args_.Int("parts") != 0 || muon || adafactor;
  const int count = several ? 4 : args_.Int("two_groups") != 0 ? 2 : 1;
  for (int g = 0; g < count; ++g) {
    const Hyper h = HyperOf(args_, g);
    groups.push_back(g == 1 && muon ? MuonValues(h) : g == 1 && adafactor ? AdafactorValues(h) : ValuesOf(h));
  }
  if (const std::string lr = Odd("odd_lr", step); !lr.empty()) groups.back().lr = std::atof(lr.c_str());
  const std::string odd_norm = Odd("odd_max_norm", step);
  const double max_norm = odd_norm.empty() ? args_.Double("max_norm") : std::atof(odd_norm.c_str());
  std::string state = "step " + std::to_string(step + 1) + " rank " + std::to_string(rank_) + ";";
  state.resize(std::max<size_t>(state.size(), args_.Int("state_bytes")), 'x');
  moments_.Reach("before_step", step);
  shardd_step_options options = {};
  options.groups = groups.data();
  options.group_count = static_cast<int32_t>(groups.size());
  options.max_grad_norm = max_norm;
  options.norm_type = std::strtod(args_.Text("norm_type", "0").c_str(), nullptr);  // "inf" too
  options.state = state.data();
  options.state_bytes = state.size();
  if (const std::string order = Odd("odd_norm_type", step); !order.empty())
    options.norm_type = std::atof(order.c_str());
  if (args_.Int("parts") != 0) RETURN_IF_ERROR(StepInParts(step, &options));
  RETURN_IF_ERROR(job_->StepWith(options));
  moments_.Reach("step_sent", step);
  if (max_norm > 0 || args_.Int("wait_step") != 0) {
    shardd_step_result result = {};
    result.struct_size = sizeof(result);
    RETURN_IF_ERROR(job_->WaitStep(&result));
    report_.norms[step] = result.grad_norm;
    report_.clips[step] = result.clip_factor;
  }
  return Status();
}

Status Trainer::StepInParts(int64_t step, shardd_step_options* options) {
  static constexpr int32_t kAll[] = {0, 1, 2, 3};
  static constexpr int32_t kLeft[][3] = {{0, 2, 3}, {0, 1, 3}, {0, 1, 2}};
  for (int part = 0; part < 2; ++part) {
    options->left_groups = kLeft[part];
    options->left_group_count = 3;
    options->part = 1;
    moments_.Reach("part", step);
    RETURN_IF_ERROR(job_->StepWith(*options));
    RETURN_IF_ERROR(job_->WaitStep());
    moments_.Reach("parted", step);
  }
  options->part = 0;
  const bool closes = args_.Int("parts") == 2 && step % 2 == 1;
  options->left_groups = closes ? kAll : kLeft[2];
  options->left_group_count = closes ? 4 : 3;
  return Status();
}

Status Trainer::Come(const std::string& moment, int64_t step) {
  moments_.Reach(moment, step);
  return moments_.At("fail", moment, step) && !std::exchange(failed_, true) ? Status(Code::kUnknown, "user code failed")
                                                                            : Status();
}

std::string Trainer::Odd(const std::string& what, int64_t step) {
  const std::string text = args_.Text(what);
  const size_t at = text.find('@');
  if (text.empty() || std::atoll(text.c_str() + at + 1) != step || !odd_.insert(what).second) {
    return "";
  }
  return text.substr(0, at);
}

Status Trainer::Finish() {
  for (auto* by_step : {&report_.losses, &report_.norms, &report_.clips}) by_step->resize(args_.Int("steps", 50));
  if (args_.Int("bits") != 0) ReportBits(*job_, &report_);
  moments_.Reach("end", args_.Int("steps", 50));
  if (args_.Int("finish", 1) == 0) {
    job_.reset();  // detaches; the job is kept
    return Status();
  }
  return job_->Finish();
}

}  // namespace shardd::e2e
