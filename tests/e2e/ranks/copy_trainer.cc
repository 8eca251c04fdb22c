#include "tests/e2e/ranks/copy_trainer.h"

#include <algorithm>
#include <string>

#include "tests/e2e/ranks/attach.h"
#include "tests/e2e/ranks/end.h"

namespace shardd::e2e {
namespace {

constexpr int64_t kWindowNumel = int64_t{1} << 20;
constexpr int64_t kSeenNumel = 64;
constexpr int64_t kPeriod = 251;  // of initial values: no power of two, so that what is moved is seen
constexpr double kLr = 1.0 / 64;  // exact, as its product with a sum of equal gradients

// Which of so many values an element begins with.
size_t Kind(int param, int64_t i) { return static_cast<size_t>((i + 37 * param) % kPeriod); }

// All of them after so many steps of so many backwards.
std::vector<float> ValuesAfter(int64_t steps, int micros, bool zeros) {
  std::vector<float> values(static_cast<size_t>(kPeriod), 0.0f);
  for (size_t kind = 0; kind < values.size() && !zeros; ++kind) values[kind] = 1 + static_cast<float>(kind) / 256;
  for (float& value : values) {
    for (int64_t step = 0; step < steps; ++step) {
      const float gradient = value * static_cast<float>(micros);  // REQUIRES: micros is 1 or 2
      value -= static_cast<float>(kLr) * gradient;
    }
  }
  return values;
}

}  // namespace

int CopyTrainer::Run() {
  Status status = Attach();
  while (status.ok()) {
    status = TrainAll();
    if (!status.aborted() || args_.Int("recover") == 0) break;
    NoteAbort(*job_, status, &report_);
    status = job_->Reattach();
  }
  FinishAsTold(args_, moments_, job_.get(), status, &report_);
  return 0;
}

Status CopyTrainer::Attach() {
  RETURN_IF_ERROR(AttachAsTold(args_, &job_));
  gpu_ = std::make_unique<RankGpu>(job_->info().cuda_device);
  seen_ = gpu_->Pinned(sizeof(float) * static_cast<size_t>(kSeenNumel));
  for (int i = 0; i < args_.Int("streams", 1); ++i) streams_.push_back(gpu_->MakeStream());
  RETURN_IF_ERROR(job_->SetCudaStream(streams_[current_]));
  report_.AddNote("ordered " + std::to_string(job_->info().stream_ordered));
  return Status();
}

// Each rank its part of every parameter.
Status CopyTrainer::Initialize() {
  const shardd_job_info info = job_->info();
  const std::vector<float> initial = ValuesAfter(0, 0, false);
  std::vector<float> chunk;
  for (int param = 0; param < info.param_count && args_.Int("zeros") == 0; ++param) {
    const int64_t numel = job_->parameter_info(param).numel;
    const int64_t end = numel * (info.rank + 1) / info.world_size;
    for (int64_t first = numel * info.rank / info.world_size; first < end; first += kWindowNumel) {
      chunk.resize(static_cast<size_t>(std::min(kWindowNumel, end - first)));
      for (size_t i = 0; i < chunk.size(); ++i) chunk[i] = initial[Kind(param, first + static_cast<int64_t>(i))];
      RETURN_IF_ERROR(job_->WriteParameter(param, chunk.data(), first, static_cast<int64_t>(chunk.size())));
    }
  }
  moments_.Reach("initial", 0);
  return job_->CommitParameters();
}

Status CopyTrainer::TrainAll() {
  if (job_->info().version == 0) RETURN_IF_ERROR(Initialize());
  for (int64_t step = job_->info().committed_step; step < args_.Int("steps"); ++step) RETURN_IF_ERROR(TrainStep(step));
  return args_.Int("look_at_all", 1) == 0 ? job_->WaitStep() : LookAtAll();
}

Status CopyTrainer::TrainStep(int64_t step) {
  if (streams_.size() > 1) {
    current_ = static_cast<size_t>(step) % streams_.size();
    RETURN_IF_ERROR(job_->SetCudaStream(streams_[current_]));
  }
  const int groups = job_->info().group_count;
  const int micros = args_.Int("micro", 1);
  for (int micro = 0; micro < micros; ++micro) {
    for (int group = 0; group < groups; ++group) RETURN_IF_ERROR(Forward(group, step));
    for (int group = groups - 1; group >= 0; --group) RETURN_IF_ERROR(Backward(group, step));
    RETURN_IF_ERROR(job_->BackwardDone(/*last=*/micro + 1 == micros));
  }
  shardd_hyperparameters sgd = {};
  sgd.lr = kLr;
  moments_.Reach("before_step", step);
  RETURN_IF_ERROR(job_->Step({sgd}, 0, "step " + std::to_string(step + 1)));
  moments_.Reach("step_sent", step);
  return Status();
}

Status CopyTrainer::Forward(int group, int64_t step) {
  ParameterGroup handle = job_->group(group);
  RETURN_IF_ERROR(handle.Unshard(SHARDD_FORWARD));
  const shardd_group_info info = handle.info();
  for (int i = 0; i < info.param_count; ++i) {
    const int64_t numel = std::min(kSeenNumel, job_->parameter_info(info.params[i]).numel);
    gpu_->Copy(streams_[current_], seen_, job_->parameter_data(info.params[i]), sizeof(float) * numel);
  }
  moments_.Reach("unsharded", step);
  return handle.Reshard();
}

Status CopyTrainer::Backward(int group, int64_t step) {
  ParameterGroup handle = job_->group(group);
  RETURN_IF_ERROR(handle.WaitGradientSlot());
  RETURN_IF_ERROR(handle.Unshard(SHARDD_BACKWARD));
  const shardd_group_info info = handle.info();
  for (int i = 0; i < info.param_count; ++i) {
    gpu_->Copy(streams_[current_], job_->gradient_data(info.params[i]), job_->parameter_data(info.params[i]),
               sizeof(float) * job_->parameter_info(info.params[i]).numel);
  }
  RETURN_IF_ERROR(handle.Reshard());
  RETURN_IF_ERROR(handle.SubmitGradients());
  moments_.Reach("submitted", step);
  return Status();
}

Status CopyTrainer::LookAtAll() {
  if (args_.Int("steps") > 0) RETURN_IF_ERROR(job_->WaitStep());
  Status wrong;
  RETURN_IF_ERROR(job_->UnshardParams(false, [&] {
    DeviceValues values;
    values.Use(job_->info().offloaded != 0 ? -1 : job_->info().cuda_device);
    gpu_->Synchronise(streams_[current_]);
    const std::vector<float> want = ValuesAfter(args_.Int("steps"), args_.Int("micro", 1), args_.Int("zeros") != 0);
    std::vector<float> chunk;
    for (int param = 0; param < job_->info().param_count && wrong.ok(); ++param) {
      const auto* const data = static_cast<const float*>(job_->full_parameter_data(param));
      const int64_t numel = job_->parameter_info(param).numel;
      for (int64_t first = 0; first < numel && wrong.ok(); first += kWindowNumel) {
        chunk.resize(static_cast<size_t>(std::min(kWindowNumel, numel - first)));
        values.Read(chunk.data(), data + first, sizeof(float) * chunk.size());
        for (size_t i = 0; i < chunk.size(); ++i) {
          const float wanted = want[Kind(param, first + static_cast<int64_t>(i))];
          if (chunk[i] == wanted) continue;
          wrong = Status(Code::kDataLoss, "parameter " + std::to_string(param) + " of " +
                                              std::to_string(job_->info().param_count) + ", element " +
                                              std::to_string(first + static_cast<int64_t>(i)) + " of " +
                                              std::to_string(numel) + ": got " + std::to_string(chunk[i]) + ", want " +
                                              std::to_string(wanted));
          break;
        }
      }
    }
  }));
  return wrong;
}

}  // namespace shardd::e2e
