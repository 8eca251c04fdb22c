// y = out . tanh(hidden x), fitted by every rank on samples of its own.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "client/cpp/shardd.h"

// The job: every rank describes it alike, and the daemon refuses one that differs. worldSize comes from WORLD_SIZE.
constexpr char kSpec[] = R"({
  "name": "first",
  "tree": {"modules": [
    {"parent": -1, "className": "Net"},
    {"parent": 0, "name": "hidden", "className": "Linear", "parameters": [
      {"name": "weight", "shape": [16, 2], "dtype": "DTYPE_FLOAT32", "requiresGrad": true}]},
    {"parent": 0, "name": "out", "className": "Linear", "parameters": [
      {"name": "weight", "shape": [16], "dtype": "DTYPE_FLOAT32", "requiresGrad": true}]}]},
  "policy": {"classes": {"classNames": ["Linear"]}},
  "config": {"optimizer": {"kind": "OPTIMIZER_KIND_ADAMW"}, "trainersNeverWrite": true}
})";
constexpr int kHidden = 16;
constexpr int64_t kSteps = 2000;

#define RETURN_IF_ERROR(call) \
  if (shardd::Status status = (call); !status.ok()) return status

// The trainer's own state: a random generator. It rides on each step and comes back with the committed one.
struct Random {
  uint64_t state = 0;
  float Next() {
    return static_cast<float>((state = state * 6364136223846793005u + 1442695040888963407u) >> 40) / (1 << 24);
  }
};

shardd::Status GiveInitialValues(shardd::Job& job) {
  if (job.info().rank == 0) {  // any rank may write any part; here one writes all
    Random random{42};
    for (const char* name : {"hidden.weight", "out.weight"}) {
      float values[2 * kHidden];
      for (float& value : values) value = random.Next() - 0.5f;
      const int32_t param = job.FindParameter(name);
      RETURN_IF_ERROR(job.WriteParameter(param, values, 0, job.parameter_info(param).numel));
    }
  }
  return job.CommitParameters();  // returns when every rank has said so: version 1 is there
}

shardd::Status Step(shardd::Job& job, Random& random, float* loss) {
  shardd::ParameterGroup hidden = job.group(job.FindGroup("hidden"));
  shardd::ParameterGroup out = job.group(job.FindGroup("out"));
  const int32_t hidden_weight = job.FindParameter("hidden.weight");
  const int32_t out_weight = job.FindParameter("out.weight");
  const float x[2] = {random.Next(), random.Next()};

  // Forward: each group is unsharded, used, resharded.
  RETURN_IF_ERROR(hidden.Unshard(SHARDD_FORWARD));
  const float* u = static_cast<const float*>(job.parameter_data(hidden_weight));  // valid until Reshard
  float h[kHidden];
  for (int i = 0; i < kHidden; ++i) h[i] = std::tanh(u[2 * i] * x[0] + u[2 * i + 1] * x[1]);
  RETURN_IF_ERROR(hidden.Reshard());

  RETURN_IF_ERROR(out.Unshard(SHARDD_FORWARD));
  const float* v = static_cast<const float*>(job.parameter_data(out_weight));
  float error = -x[0] * x[1];
  for (int i = 0; i < kHidden; ++i) error += v[i] * h[i];
  RETURN_IF_ERROR(out.Reshard());
  *loss = error * error / 2;

  // Backward, in reverse: gradients go into the rank's slot. Old bytes in it have no meaning: overwrite all of it.
  float dh[kHidden];
  RETURN_IF_ERROR(out.Unshard(SHARDD_BACKWARD));
  RETURN_IF_ERROR(out.WaitGradientSlot());
  v = static_cast<const float*>(job.parameter_data(out_weight));
  float* dv = static_cast<float*>(job.gradient_data(out_weight));
  for (int i = 0; i < kHidden; ++i) {
    dv[i] = error * h[i];
    dh[i] = error * v[i] * (1 - h[i] * h[i]);
  }
  RETURN_IF_ERROR(out.SubmitGradients());
  RETURN_IF_ERROR(out.Reshard());

  RETURN_IF_ERROR(hidden.WaitGradientSlot());  // its gradient needs no parameter of its own, so no unshard
  float* du = static_cast<float*>(job.gradient_data(hidden_weight));
  for (int i = 0; i < kHidden; ++i) {
    du[2 * i] = dh[i] * x[0];
    du[2 * i + 1] = dh[i] * x[1];
  }
  RETURN_IF_ERROR(hidden.SubmitGradients());
  RETURN_IF_ERROR(job.BackwardDone(/*last=*/true));  // false: another micro-batch adds to the same step

  shardd_hyperparameters adamw{};
  adamw.lr = 0.01, adamw.beta1 = 0.9, adamw.beta2 = 0.999, adamw.eps = 1e-8;
  const std::string state(reinterpret_cast<const char*>(&random.state), sizeof(random.state));
  return job.Step({adamw}, /*max_grad_norm=*/1.0, state);  // asynchronous: the next unshard waits for the commit
}

// From wherever the job stands to the last step.
shardd::Status Train(shardd::Job& job) {
  if (job.info().version == 0) RETURN_IF_ERROR(GiveInitialValues(job));
  const int64_t first = job.info().committed_step;
  Random random{static_cast<uint64_t>(job.info().rank + 1)};
  if (first > 0) std::memcpy(&random.state, job.trainer_state().data(), sizeof(random.state));
  std::printf("rank %d starts at step %lld\n", job.info().rank, static_cast<long long>(first));
  float loss = 0, mean = 1;
  for (int64_t step = first; step < kSteps; ++step) {
    RETURN_IF_ERROR(Step(job, random, &loss));
    mean += 0.01f * (loss - mean);
  }
  RETURN_IF_ERROR(job.WaitStep());
  std::printf("rank %d: loss %.2g\n", job.info().rank, static_cast<double>(mean));
  return {};
}

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a rank that is killed has printed what it said
  std::unique_ptr<shardd::Job> job;
  shardd::Job::Options options;
  options.spec_json = kSpec;
  shardd::Status status = shardd::Job::Attach(options, &job);  // RANK and WORLD_SIZE from the environment
  while (status.ok()) {
    status = Train(*job);
    if (!status.aborted()) break;
    // A rank died, or a step could not be completed. Nothing committed is lost: attach again, go on from there.
    std::printf("aborted: %s\n", status.message().c_str());
    status = job->Reattach();
  }
  if (status.ok()) status = job->Finish();  // when all ranks have said so, the daemon frees the job
  if (!status.ok()) std::fprintf(stderr, "first: %s\n", status.message().c_str());
  return status.ok() ? 0 : 1;
}
