#include "tests/e2e/ranks/pass_trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#include <utility>

#include "tests/e2e/ranks/attach.h"
#include "tests/e2e/ranks/end.h"
#include "tests/e2e/ranks/precision.h"
#include "tests/e2e/ranks/step_limit.h"

namespace shardd::e2e {
namespace {

constexpr int64_t kPeriod = 251;  // of initial values: no power of two, so that what is moved is seen
constexpr float kLr = 1.0f / 64;

size_t KindOf(int param, int64_t i) { return static_cast<size_t>((i + 37 * param) % kPeriod); }
float Initial(size_t kind) { return 1 + static_cast<float>(kind) / 256; }

// What a step of Adam, or of SGD with momentum, does with an element. `number` counts from 1.
class StepOf {
 public:
  StepOf(bool adam, int64_t number)
      : adam_(adam),
        first_correction_(1 - std::pow(0.9f, static_cast<float>(number))),
        second_correction_(1 - std::pow(0.99f, static_cast<float>(number))) {}
  void Update(float gradient, float& value, float& first, float& second) const {
    if (!adam_) {
      first = 0.5f * first + gradient;
      value -= kLr * first;
      return;
    }
    first = 0.9f * first + 0.1f * gradient;
    second = 0.99f * second + 0.01f * gradient * gradient;
    value -= kLr * (first / first_correction_) / (std::sqrt(second / second_correction_) + 1e-6f);
  }

 private:
  bool adam_;
  float first_correction_, second_correction_;
};

// All kinds of elements after so many steps, by one who holds the whole model.
std::vector<float> ValuesAfter(const Args& args, int64_t steps) {
  const bool adam = args.Text("trained") == "adam";
  const bool bf16 = args.Text("param_dtype") == "bf16";
  const bool midway = args.Int("midway") != 0;
  const auto micros = static_cast<float>(args.Int("micro", 1));
  std::vector<StepOf> updates;
  for (int64_t step = 0; step < steps; ++step) updates.emplace_back(adam, step + 1);
  std::vector<float> values(static_cast<size_t>(kPeriod));
  for (size_t kind = 0; kind < values.size(); ++kind) {
    float value = Initial(kind), first = 0, second = 0;
    for (const StepOf& update : updates) {
      const float read = bf16 ? tensor::Bf16ToFloat(tensor::FloatToBf16(value)) : value;
      if (midway) value *= 0.75f;
      update.Update(read * micros, value, first, second);
    }
    values[kind] = value;
  }
  return values;
}

}  // namespace

PassTrainer::PassTrainer(const Args& args)
    : args_(args),
      moments_(args_),
      bf16_(args.Text("param_dtype") == "bf16"),
      states_(args.Text("trained") == "adam" ? 2 : 1) {}

int PassTrainer::Run() {
  Status status = Attach();
  while (status.ok()) {
    status = TrainAll();
    if (!status.aborted() || args_.Int("recover") == 0) break;
    NoteAbort(*job_, status, &report_);
    moments_.Reach("aborted", job_->info().committed_step);
    if (gpu_ != nullptr) gpu_->Synchronise(stream_);
    status = ReattachTimed(*job_, &report_);
  }
  FinishAsTold(args_, moments_, job_.get(), status, &report_);
  return 0;
}

Status PassTrainer::Attach() {
  RETURN_IF_ERROR(AttachAsTold(args_, &job_));
  const shardd_job_info info = job_->info();
  if (info.cuda_device >= 0) {
    gpu_ = std::make_unique<RankGpu>(info.cuda_device);
    stream_ = gpu_->MakeStream();
    if (args_.Int("ordered", 1) != 0) RETURN_IF_ERROR(job_->SetCudaStream(stream_));
  }
  ordered_ = job_->info().stream_ordered != 0;
  report_.AddNote("ordered " + std::to_string(ordered_ ? 1 : 0));
  buffers_.resize(static_cast<size_t>(info.param_count));
  for (int param = 0; param < info.param_count; ++param) {
    const size_t size_bytes = sizeof(float) * static_cast<size_t>(job_->parameter_info(param).numel);
    const auto make = [&] {
      return static_cast<float*>(gpu_ != nullptr ? gpu_->Pinned(size_bytes) : calloc(1, size_bytes));
    };
    buffers_[static_cast<size_t>(param)] = {make(), make(), {make(), make()}};
  }
  return Status();
}

void PassTrainer::Move(void* to, const void* from, int64_t numel, int64_t element_bytes) const {
  const auto size_bytes = static_cast<size_t>(numel * element_bytes);
  if (size_bytes == 0) return;
  if (gpu_ == nullptr) {
    std::memcpy(to, from, size_bytes);
  } else {
    gpu_->Copy(stream_, to, from, size_bytes);
  }
}

void PassTrainer::Compute(std::function<void()> body) const {
  if (gpu_ == nullptr) {
    body();
    return;
  }
  gpu_->Launch(
      stream_,
      [](void* data) {
        const std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(data));
        (*owned)();
      },
      new std::function<void()>(std::move(body)));
}

void PassTrainer::Fence() const {
  if (gpu_ != nullptr && !ordered_) gpu_->Synchronise(stream_);
}

Status PassTrainer::Initialize() {
  const shardd_job_info info = job_->info();
  std::vector<float> values;
  for (int param = info.rank; param < info.param_count; param += info.world_size) {
    values.resize(static_cast<size_t>(job_->parameter_info(param).numel));
    for (size_t i = 0; i < values.size(); ++i) values[i] = Initial(KindOf(param, static_cast<int64_t>(i)));
    RETURN_IF_ERROR(job_->WriteParameter(param, values.data(), 0, static_cast<int64_t>(values.size())));
  }
  return job_->CommitParameters();
}

// The optimizer step before it, if there was one, is committed with it.
Status PassTrainer::Enter() {
  Fence();
  const bool stepped = stepped_ > job_->info().committed_step;
  return job_->EnterPass(stepped, stepped ? "step " + std::to_string(stepped_) : std::string());
}

Status PassTrainer::TrainAll() {
  if (job_->info().version == 0) RETURN_IF_ERROR(Initialize());
  stepped_ = job_->info().committed_step;
  const std::string state = job_->trainer_state();
  if (stepped_ > 0 && state != "step " + std::to_string(stepped_)) {
    return Status(Code::kDataLoss, "state of another step (got " + state + ", want " + std::to_string(stepped_) + ")");
  }
  for (int64_t step = stepped_; step < StepsToTrain(args_, step); ++step) RETURN_IF_ERROR(TrainStep(step));
  const int steps = args_.Int("steps");
  RETURN_IF_ERROR(Enter());
  RETURN_IF_ERROR(job_->LeavePass());
  if (job_->info().committed_step != steps) {
    return Status(Code::kDataLoss, "committed " + std::to_string(job_->info().committed_step) + " steps");
  }
  RETURN_IF_ERROR(LookAtAll(steps));
  if (args_.Int("writeback") == 0) return Status();
  RETURN_IF_ERROR(Writeback());
  return LookAtAll(steps);
}

Status PassTrainer::TrainStep(int64_t step) {
  const int groups = job_->info().group_count;
  const int micros = args_.Int("micro", 1);
  moments_.Reach("before_pass", step);
  const bool ahead = args_.Text("ahead") == std::to_string(step);
  if (ahead) StandStill(20'000);
  if (args_.Text("stuck") == std::to_string(step)) StandStill(4'000);
  RETURN_IF_ERROR(Enter());
  moments_.Reach("entered", step);
  if (ahead) {
    for (int group = 0; group < groups; ++group) RETURN_IF_ERROR(Forward(group));
    goes_on_ = true;
    gpu_->Synchronise(stream_);
    report_.AddNote(was_let_go_ ? "ahead 1" : "ahead 0");
  }
  for (int micro = 0; micro < micros; ++micro) {
    for (int group = 0; group < groups; ++group) RETURN_IF_ERROR(Forward(group));
    if (micro == 0 && args_.Int("midway") != 0) {
      Midway();
      moments_.Reach("midway", step);
    }
    for (int group = groups - 1; group >= 0; --group) RETURN_IF_ERROR(Backward(group, micro == 0));
    Fence();
    RETURN_IF_ERROR(job_->BackwardDone(/*last=*/micro + 1 == micros));
  }
  RETURN_IF_ERROR(job_->LeavePass());
  RETURN_IF_ERROR(job_->WaitGradients());
  if (args_.Int("asks") != 0) RETURN_IF_ERROR(AwaitStore(*job_));
  moments_.Reach("before_update", step);
  Update(step);
  stepped_ = step + 1;
  moments_.Reach("updated", step);
  return Status();
}

Status PassTrainer::Forward(int group) {
  ParameterGroup handle = job_->group(group);
  RETURN_IF_ERROR(handle.Unshard(SHARDD_FORWARD));
  Fence();
  return handle.Reshard();
}

// Gradients stay until new ones replace them: those of a step's first backward do.
Status PassTrainer::Backward(int group, bool first) {
  ParameterGroup handle = job_->group(group);
  RETURN_IF_ERROR(handle.WaitGradientSlot());
  RETURN_IF_ERROR(handle.Unshard(SHARDD_BACKWARD));
  const shardd_group_info info = handle.info();
  for (int i = 0; i < info.param_count; ++i) {
    const int param = info.params[i];
    Move(job_->gradient_data(param), job_->parameter_data(param), job_->parameter_info(param).numel, bf16_ ? 2 : 4);
  }
  Fence();
  RETURN_IF_ERROR(handle.Reshard());
  std::vector<uint8_t> fresh((static_cast<size_t>(info.param_count) + 7) / 8, 0xff);
  if (info.param_count % 8 != 0) fresh.back() = static_cast<uint8_t>((1u << (info.param_count % 8)) - 1);
  return handle.SubmitGradients(nullptr, first ? fresh.data() : nullptr);
}

void PassTrainer::StandStill(int64_t limit_ms) {
  Compute([this, limit_ms] {
    const int64_t end = NowMs() + limit_ms;
    while (!goes_on_ && NowMs() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    was_let_go_ = goes_on_.load();
  });
}

void PassTrainer::Midway() {
  for (int param = 0; param < job_->info().param_count; ++param) {
    const shardd_shard_range range = job_->shard_range(param);
    const Buffers& of = buffers_[static_cast<size_t>(param)];
    float* const shard = static_cast<float*>(job_->shard_data(param)) + range.write_first;
    Move(of.value, shard, range.write_numel, sizeof(float));
    Compute([value = of.value, numel = range.write_numel] {
      for (int64_t i = 0; i < numel; ++i) value[i] *= 0.75f;
    });
    Move(shard, of.value, range.write_numel, sizeof(float));
  }
}

void PassTrainer::Update(int64_t step) {
  const int params = job_->info().param_count;
  for (int param = 0; param < params; ++param) {
    if (param == params / 2) moments_.Reach("updating", step);
    const shardd_shard_range range = job_->shard_range(param);
    const int64_t first = range.write_first;
    const int64_t numel = range.write_numel;
    const Buffers& of = buffers_[static_cast<size_t>(param)];
    float* const shard = static_cast<float*>(job_->shard_data(param)) + first;
    Move(of.value, shard, numel, sizeof(float));
    Move(of.gradient, static_cast<const float*>(job_->gradient_shard_data(param)) + first, numel, sizeof(float));
    for (int s = 0; s < states_; ++s) {
      Move(of.state[s], static_cast<const float*>(job_->optimizer_state_data(param, s)) + first, numel, sizeof(float));
    }
    Compute([of, numel, step, adam = states_ == 2] {
      const StepOf update(adam, step + 1);
      for (int64_t i = 0; i < numel; ++i) {
        update.Update(of.gradient[i], of.value[i], of.state[0][i], of.state[1][i]);
      }
    });
    Move(shard, of.value, numel, sizeof(float));
    for (int s = 0; s < states_; ++s) {
      Move(static_cast<float*>(job_->optimizer_state_data(param, s)) + first, of.state[s], numel, sizeof(float));
    }
  }
}

Status PassTrainer::LookAtAll(int64_t steps) {
  const std::vector<float> want = ValuesAfter(args_, steps);
  Fence();
  if (args_.Int("by_groups") != 0) return LookByGroups(want);
  Status wrong;
  RETURN_IF_ERROR(job_->UnshardParams(false, [&] {
    for (int param = 0; param < job_->info().param_count && wrong.ok(); ++param) {
      const int64_t numel = job_->parameter_info(param).numel;
      Move(buffers_[static_cast<size_t>(param)].value, job_->full_parameter_data(param), numel, sizeof(float));
      if (gpu_ != nullptr) gpu_->Synchronise(stream_);
      wrong = LookAt(param, want);
    }
  }));
  return wrong;
}

Status PassTrainer::LookAt(int param, const std::vector<float>& want) const {
  const double tolerance = args_.Int("exact") != 0 ? 0 : 1e-4;
  const float* const got = buffers_[static_cast<size_t>(param)].value;
  const int64_t numel = job_->parameter_info(param).numel;
  for (int64_t i = 0; i < numel; ++i) {
    const double wanted = factor_ * want[KindOf(param, i)];
    if (std::abs(got[i] - wanted) <= tolerance * std::abs(wanted)) continue;
    return Status(Code::kDataLoss, "parameter " + std::to_string(param) + ", element " + std::to_string(i) + " of " +
                                       std::to_string(numel) + ": got " + std::to_string(got[i]) + ", want " +
                                       std::to_string(wanted));
  }
  return Status();
}

Status PassTrainer::LookByGroups(const std::vector<float>& want) {
  RETURN_IF_ERROR(job_->EnterPass(/*stepped=*/false, ""));
  for (int group = 0; group < job_->info().group_count; ++group) {
    ParameterGroup handle = job_->group(group);
    RETURN_IF_ERROR(handle.Unshard(SHARDD_FORWARD));
    const shardd_group_info info = handle.info();
    for (int i = 0; i < info.param_count; ++i) {
      const int param = info.params[i];
      Move(buffers_[static_cast<size_t>(param)].value, job_->parameter_data(param), job_->parameter_info(param).numel,
           sizeof(float));
      if (gpu_ != nullptr) gpu_->Synchronise(stream_);
      RETURN_IF_ERROR(LookAt(param, want));
    }
    RETURN_IF_ERROR(handle.Reshard());
  }
  return job_->LeavePass();
}

// Each rank some of the parameters; `value` has what LookAtAll has read.
Status PassTrainer::Writeback() {
  const shardd_job_info info = job_->info();
  Fence();
  Status inner;
  RETURN_IF_ERROR(job_->UnshardParams(true, [&] {
    for (int param = info.rank; param < info.param_count && inner.ok(); param += info.world_size) {
      const int64_t numel = job_->parameter_info(param).numel;
      std::vector<float> twice(buffers_[static_cast<size_t>(param)].value,
                               buffers_[static_cast<size_t>(param)].value + numel);
      for (float& value : twice) value *= 2;
      inner = job_->WriteParameter(param, twice.data(), 0, numel);
    }
  }));
  factor_ = 2;
  moments_.Reach("written_back", args_.Int("steps"));
  return inner;
}

}  // namespace shardd::e2e
