#include "tests/bench/bench_daemon.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace shardd::bench {
namespace {

[[noreturn]] void Die(const std::string& text) {
  std::fprintf(stderr, "bench: %s\n", text.c_str());
  std::_Exit(1);
}

}  // namespace

BenchDaemon::BenchDaemon(int devices)
    : daemon_(folder_.path(), "cpu:" + std::to_string(devices), {"--log_level=warning"}) {
  if (!daemon_.listened()) {
    Die("the daemon did not come up: " + testing::ReadWholeFile(daemon_.log()));
  }
}

double BenchDaemon::CpuSeconds() const {
  std::ifstream file("/proc/" + std::to_string(daemon_.pid()) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::istringstream fields(text.substr(text.rfind(')') + 2));
  std::string skip;
  for (int i = 0; i < 11; ++i) {
    fields >> skip;
  }
  double user = 0;
  double system = 0;
  fields >> user >> system;
  return (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

void CheckOrDie(const Status& status) {
  if (!status.ok()) {
    Die(status.message());
  }
}

std::string GroupsSpec(const std::string& name, int world, int groups, int64_t numel, const std::string& config) {
  std::ostringstream spec;
  spec << R"({"name": ")" << name << R"(", "worldSize": )" << world
       << R"(, "tree": {"modules": [{"className": "Root", "parent": -1})";
  for (int g = 0; g < groups; ++g) {
    spec << R"(, {"name": "g)" << g
         << R"(", "className": "Block", "parent": 0, "mark": "MODULE_MARK_FULLY_SHARD", "parameters": [)"
         << R"({"name": "w", "shape": [)" << numel << R"(], "dtype": "DTYPE_FLOAT32", "requiresGrad": true}]})";
  }
  spec << R"(]}, "config": {"trainersNeverWrite": true, "optimizer": {"kind": "OPTIMIZER_KIND_ADAMW"})" << config
       << "}}";
  return spec.str();
}

std::unique_ptr<Job> AttachOrDie(const std::string& spec, int rank, const std::string& address) {
  Job::Options options;
  options.spec_json = spec;
  options.rank = rank;
  options.address = address;
  std::unique_ptr<Job> job;
  CheckOrDie(Job::Attach(options, &job));
  if (job->info().version == 0) {
    CheckOrDie(job->CommitParameters());
  }
  return job;
}

void StepAndWait(Job& job) {
  shardd_hyperparameters hyper{};
  hyper.beta1 = 0.9;
  hyper.beta2 = 0.999;
  hyper.eps = 1e-8;
  CheckOrDie(job.Step({hyper}));
  CheckOrDie(job.WaitStep());
}

}  // namespace shardd::bench
