// The C++ API: one rank attaches to a job; with no address given the installed library starts the installed daemon.
#include <cstdio>
#include <memory>

#include "client/cpp/shardd.h"

int main() {
  shardd::Job::Options options;
  options.rank = 0;
  options.spec_json = R"({"name": "install", "worldSize": 1, "config": {"trainersNeverWrite": true},
    "tree": {"modules": [{"className": "Model", "parent": -1,
      "parameters": [{"name": "weight", "shape": [3, 5], "dtype": "DTYPE_FLOAT32", "requiresGrad": true}]}]}})";
  std::unique_ptr<shardd::Job> job;
  shardd::Status status = shardd::Job::Attach(options, &job);
  if (!status.ok()) {
    std::printf("attach: %d %s\n", static_cast<int>(status.code()), status.message().c_str());
    return 1;
  }
  std::printf("attached to %s, %d parameters\n", job->info().address, job->info().param_count);
  const bool right = job->info().param_count == 1 && job->FindParameter("weight") == 0;
  status = job->Finish();
  return right && status.ok() ? 0 : 1;
}
