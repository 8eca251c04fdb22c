#include "tests/e2e/ranks/blocks.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <vector>

#include "common/tensor/float_bits.h"
#include "tests/e2e/ranks/attach.h"
#include "tests/e2e/ranks/end.h"
#include "tests/e2e/ranks/step_limit.h"

namespace shardd::e2e {
namespace {

constexpr int64_t kChunkNumel = 65536;  // that a rank copies at a time

float Target(int64_t i) { return static_cast<float>(i % 13 - 6) / 8; }

float ToFloat(float x) { return x; }
float ToFloat(uint16_t x) { return tensor::Bf16ToFloat(x); }
void Assign(float& to, float x) { to = x; }
void Assign(uint16_t& to, float x) { to = tensor::FloatToBf16(x); }

}  // namespace

std::string BlocksTreeJson(const Args& args) {
  const auto param = [](const std::string& name, int numel, bool trained = true) {
    return R"({"name":")" + name + R"(","shape":[)" + std::to_string(numel) +
           R"(],"dtype":"DTYPE_FLOAT32","requiresGrad":)" + (trained ? "true" : "false") + "}";
  };
  const bool bias_trained = args.Text("extend").empty();
  const std::string mark = args.Int("manual_marks") != 0 ? R"("mark":"MODULE_MARK_FULLY_SHARD",)" : "";
  std::string json = R"({"modules":[{"className":"Model","parent":-1,"parameters":[)" + param("scale", 77) + "]}";
  int modules = 1;
  const auto add = [&](const std::string& name, int parent) {
    json += R"(,{"name":")" + name + R"(","className":"Block",)" + mark + R"("parent":)" + std::to_string(parent) +
            R"(,"parameters":[)" + param("weight", args.Int("numel")) + "," + param("bias", 1021, bias_trained) + "]}";
    return modules++;
  };
  for (int b = 0; b < args.Int("blocks"); ++b) {
    const std::string name = "block" + std::to_string(b);
    const int block = add(name, 0);
    for (const char* inner : {".left", ".right"}) {
      if (args.Int("nested") != 0) add(name + inner, block);
    }
  }
  return json + "]}";
}

BlocksTrainer::BlocksTrainer(const Args& args)
    : args_(args), moments_(args_), bf16_(args.Text("param_dtype") == "bf16") {}

int BlocksTrainer::Run() {
  Status status = AttachAsTold(args_, &job_);
  while (status.ok()) {
    status = TrainAll();
    if (!status.aborted() || args_.Int("recover") == 0) break;
    NoteAbort(*job_, status, &report_);
    status = ReattachTimed(*job_, &report_);  // TrainAll looks where its memory is
    // It was extended for the others, and this rank's daemon died before it was told.
    if (!status.ok() && job_->info().trains_more != 0) status = Adopt();
  }
  FinishAsTold(args_, moments_, job_.get(), status, &report_);
  return 0;
}

Status BlocksTrainer::TrainAll() {
  unsharded_.Use(job_->info().cuda_device);
  if (job_->info().version == 0) {
    RETURN_IF_ERROR(job_->CommitParameters());  // zeros
  }
  for (int64_t step = job_->info().committed_step; step < StepsToTrain(args_, step); ++step) {
    if (args_.Text("extend") == std::to_string(step)) RETURN_IF_ERROR(Extend());
    RETURN_IF_ERROR(TrainStep(step));
    if (args_.Int("give_back") != 0) RETURN_IF_ERROR(GiveBack(step));
  }
  return job_->WaitStep();
}

// Biases are trained from now on. Another job takes this one's place.
Status BlocksTrainer::Extend() {
  Job::Options options = OptionsAsTold(args_);
  const std::string frozen = R"("requiresGrad":false)";
  for (size_t at = 0; (at = options.spec_json.find(frozen, at)) != std::string::npos;) {
    options.spec_json.replace(at, frozen.size(), R"("requiresGrad":true)");
  }
  moments_.Reach("extending", 0);
  bool extended = false;
  RETURN_IF_ERROR(job_->Extend(options.spec_json, &extended));
  // Where its daemon died behind another rank's answer, it is that job already.
  if (!extended && args_.Int("recover") == 0) return Status(Code::kDataLoss, "not extended");
  if (!extended) return Status();
  RETURN_IF_ERROR(Adopt());
  unsharded_.Use(job_->info().cuda_device);
  report_.AddNote("extended at " + std::to_string(job_->info().committed_step));
  return Status();
}

// Attaches to the job that has taken the place of this one.
Status BlocksTrainer::Adopt() {
  job_.reset();
  Job::Options options = OptionsAsTold(args_);
  options.adopt = true;
  return Job::Attach(options, &job_);
}

Status BlocksTrainer::GiveBack(int64_t step) {
  RETURN_IF_ERROR(job_->WaitStep());
  for (int param = 0; param < job_->info().param_count; ++param) RETURN_IF_ERROR(job_->GiveBackGradient(param));
  moments_.Reach("given_back", step);
  return Status();
}

Status BlocksTrainer::TrainStep(int64_t step) {
  const int groups = job_->info().group_count;
  double loss = 0;
  if (args_.Int("trainers_write") != 0) {
    if (step > 0) {
      RETURN_IF_ERROR(Edit(step));
    }
    RETURN_IF_ERROR(job_->EnterPass());
  }
  for (int g = 0; g < groups; ++g) {
    RETURN_IF_ERROR(
        WithGroup(g, SHARDD_FORWARD, [&](int param) { loss += bf16_ ? Loss<uint16_t>(param) : Loss<float>(param); }));
  }
  report_.losses.resize(static_cast<size_t>(step));  // done again after an abort
  report_.losses.push_back(loss);
  for (int g = groups - 1; g >= 0; --g) {
    RETURN_IF_ERROR(job_->group(g).WaitGradientSlot());
    RETURN_IF_ERROR(WithGroup(
        g, SHARDD_BACKWARD, [&](int param) { bf16_ ? WriteGradient<uint16_t>(param) : WriteGradient<float>(param); }));
    RETURN_IF_ERROR(job_->group(g).SubmitGradients());
  }
  RETURN_IF_ERROR(job_->BackwardDone(/*last=*/true));
  shardd_hyperparameters adamw = {};
  adamw.lr = 0.05;
  adamw.beta1 = 0.9;
  adamw.beta2 = 0.99;
  adamw.eps = 1e-8;
  return job_->Step({adamw}, args_.Double("max_norm"), "step " + std::to_string(step + 1));
}

// Rank r clamps what it holds of every parameter, and sets the first element: values that do not change are no edit,
// and an edit that is made again after an abort is the same.
Status BlocksTrainer::Edit(int64_t step) {
  if (job_->info().committed_step < step) RETURN_IF_ERROR(job_->WaitStep());
  RETURN_IF_ERROR(job_->HandInEdits());
  const shardd_job_info info = job_->info();
  for (int param = 0; param < info.param_count; ++param) {
    auto* const values = static_cast<float*>(job_->shard_data(param));
    const int64_t numel = job_->parameter_info(param).numel;
    const int64_t first = numel * info.rank / info.world_size;
    const int64_t end = numel * (info.rank + 1) / info.world_size;
    for (int64_t at = first; at < end; at += kChunkNumel) {
      std::vector<float> edited(static_cast<size_t>(std::min(kChunkNumel, end - at)));
      unsharded_.Read(edited.data(), values + at, sizeof(float) * edited.size());
      for (float& value : edited) value = std::min(std::max(value, -10.0f), 10.0f);
      if (at == first) edited[0] = 0.001f * static_cast<float>(step % 100);
      unsharded_.Write(values + at, edited.data(), sizeof(float) * edited.size());
    }
  }
  return Status();
}

template <typename Body>
Status BlocksTrainer::WithGroup(int group, shardd_phase phase, Body&& body) {
  ParameterGroup handle = job_->group(group);
  RETURN_IF_ERROR(handle.Unshard(phase));
  const shardd_group_info info = handle.info();
  for (int i = 0; i < info.param_count; ++i) body(info.params[i]);
  return handle.Reshard();
}

template <typename T, typename Body>
void BlocksTrainer::WithChunks(int param, Body&& body) const {
  const T* const values = static_cast<const T*>(job_->parameter_data(param));
  const int64_t numel = job_->parameter_info(param).numel;
  std::vector<T> chunk(static_cast<size_t>(std::min(numel, kChunkNumel)));
  for (int64_t first = 0; first < numel; first += kChunkNumel) {
    const int64_t count = std::min(kChunkNumel, numel - first);
    unsharded_.Read(chunk.data(), values + first, sizeof(T) * static_cast<size_t>(count));
    body(first, chunk.data(), count);
  }
}

template <typename T>
double BlocksTrainer::Loss(int param) const {
  double loss = 0;
  WithChunks<T>(param, [&](int64_t first, const T* chunk, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const float error = ToFloat(chunk[i]) - Target(first + i);
      loss += error * error / 2;
    }
  });
  return loss;
}

template <typename T>
void BlocksTrainer::WriteGradient(int param) const {
  T* const gradient = static_cast<T*>(job_->gradient_data(param));
  if (gradient == nullptr) return;  // frozen
  WithChunks<T>(param, [&](int64_t first, T* chunk, int64_t count) {
    for (int64_t i = 0; i < count; ++i) Assign(chunk[i], ToFloat(chunk[i]) - Target(first + i));
    unsharded_.Write(gradient + first, chunk, sizeof(T) * static_cast<size_t>(count));
  });
}

}  // namespace shardd::e2e
