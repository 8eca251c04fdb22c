// The smallest trainer: a linear model y = w x + b, fitted by several processes with the daemon's SGD. No torch,
// nothing but client/cpp/shardd.h.
//
//   linear [ranks]      starts `ranks` processes (2) of itself; or start them yourself with RANK and WORLD_SIZE set
//
// Without a daemon at SHARDD_ADDRESS or /run/shardd/shardd.sock the client library starts one for this job.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "client/cpp/shardd.h"

namespace {

constexpr int kFeatures = 7;
constexpr int kRowsPerRank = 16;
constexpr int kSteps = 200;

constexpr char kSpec[] =
    R"({"name": "linear", "tree": {"modules": [{"className": "Linear", "parent": -1, "parameters": [
  {"name": "weight", "shape": [7], "dtype": "DTYPE_FLOAT32", "requiresGrad": true},
  {"name": "bias", "shape": [1], "dtype": "DTYPE_FLOAT32", "requiresGrad": true}]}]},
  "config": {"optimizer": {"kind": "OPTIMIZER_KIND_SGD"}, "trainersNeverWrite": true}})";

void Check(const shardd::Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "linear: %s\n", status.message().c_str());
    std::exit(1);
  }
}

// Rows that depend on nothing but rank and step, so that a replacement sees what its predecessor saw.
float Feature(int rank, int64_t step, int row, int column) {
  return std::sin(static_cast<float>(rank * 131 + step * 17 + row * 5 + column * 3 + 1));
}
float Target(const float* x) {
  float y = 0.5f;
  for (int j = 0; j < kFeatures; ++j) {
    y += static_cast<float>(j - 3) * x[j];
  }
  return y;
}

int Train() {
  shardd::Job::Options options;
  options.spec_json = kSpec;
  std::unique_ptr<shardd::Job> job;
  Check(shardd::Job::Attach(options, &job));
  const int32_t weight = job->FindParameter("weight");
  const int32_t bias = job->FindParameter("bias");
  const int rank = job->info().rank;
  if (job->info().version == 0) {  // nobody has given values yet
    if (rank == 0) {
      const float zeros[kFeatures] = {};
      Check(job->WriteParameter(weight, zeros, 0, kFeatures));
      Check(job->WriteParameter(bias, zeros, 0, 1));
    }
    Check(job->CommitParameters());
  }
  shardd::ParameterGroup group = job->group(0);
  float loss = 0;
  for (int64_t step = job->info().committed_step; step < kSteps; ++step) {
    Check(group.Unshard(SHARDD_FORWARD));
    Check(group.WaitGradientSlot());
    const float* w = static_cast<const float*>(job->parameter_data(weight));
    const float* b = static_cast<const float*>(job->parameter_data(bias));
    float* weight_gradient = static_cast<float*>(job->gradient_data(weight));
    float* bias_gradient = static_cast<float*>(job->gradient_data(bias));
    std::fill(weight_gradient, weight_gradient + kFeatures, 0.0f);
    *bias_gradient = 0;
    loss = 0;
    for (int row = 0; row < kRowsPerRank; ++row) {
      float x[kFeatures];
      float y = *b;
      for (int j = 0; j < kFeatures; ++j) {
        x[j] = Feature(rank, step, row, j);
        y += w[j] * x[j];
      }
      const float error = y - Target(x);
      loss += error * error / kRowsPerRank;
      for (int j = 0; j < kFeatures; ++j) {
        weight_gradient[j] += 2 * error * x[j] / kRowsPerRank;
      }
      *bias_gradient += 2 * error / kRowsPerRank;
    }
    Check(group.SubmitGradients());
    Check(group.Reshard());
    Check(job->BackwardDone(/*last=*/true));
    shardd_hyperparameters hyper{};
    hyper.lr = 0.2;
    Check(job->Step({hyper}));
    if (rank == 0 && (step % 40 == 0 || step + 1 == kSteps)) {
      std::printf("step %3lld  loss %.3g\n", static_cast<long long>(step), static_cast<double>(loss));
    }
  }
  Check(job->WaitStep());
  Check(job->Finish());
  if (!(loss < 1e-3f)) {
    std::fprintf(stderr, "linear: rank %d: loss did not fall (got %g, want < 1e-3)\n", rank, static_cast<double>(loss));
    return 1;
  }
  return 0;
}

// Starts one process per rank and waits for them all.
int Launch(int ranks, char** argv) {
  setenv("WORLD_SIZE", std::to_string(ranks).c_str(), 1);
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      setenv("RANK", std::to_string(rank).c_str(), 1);
      execv("/proc/self/exe", argv);
      _exit(127);
    }
    children.push_back(child);
  }
  int failures = 0;
  for (const pid_t child : children) {
    int status = 0;
    failures += (waitpid(child, &status, 0) != child || status != 0) ? 1 : 0;
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (std::getenv("RANK") != nullptr) {
    return Train();
  }
  return Launch(argc > 1 ? std::atoi(argv[1]) : 2, argv);
}
