// What a neighbour costs: one daemon with one device, a victim of 1 M parameters that trains, and beside it, by turns,
// what another tenant's large job makes the daemon do, or a hostile client. The victim's step beside the same victim's
// step alone, and while the neighbour does the same at another daemon: what is left then is the daemon's part, not that
// of a machine with few cores.
//
// The neighbour is a process of its own, this program again (main). SHARDD_BENCH_NEIGHBOUR_MIB: parameters, gradients
// and moments of its job together (64 when not set; figures are taken with 2048). SHARDD_BENCH_ACTS: how often it acts
// (5). SHARDD_BENCH_WIDE: parameters of the job that hostile clients ask about (100,000).

#include <benchmark/benchmark.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/bench/bench_daemon.h"
#include "tests/bench/hostile_neighbour.h"

namespace shardd::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kVictimGroups = 4;
constexpr int kStepsAlone = 100;
// Of the neighbour, each measured. The hostile ones that end at once ("steps") want hundreds for a p99.
int Times() {
  const char* acts = std::getenv("SHARDD_BENCH_ACTS");
  return acts == nullptr ? 5 : std::atoi(acts);
}

void Backward(Job& job, int groups) {
  for (int g = groups - 1; g >= 0; --g) {
    ParameterGroup group = job.group(g);
    CheckOrDie(group.WaitGradientSlot());
    CheckOrDie(group.Unshard(SHARDD_BACKWARD));
    CheckOrDie(group.Reshard());
    CheckOrDie(group.SubmitGradients());
  }
  CheckOrDie(job.BackwardDone(true));
}

// The neighbour ------------------------------------------------------------------------------------------------------

constexpr int kNeighbourGroups = 8;

int64_t NeighbourNumel() {  // of one group
  const char* mib = std::getenv("SHARDD_BENCH_NEIGHBOUR_MIB");
  return (int64_t{mib == nullptr ? 64 : std::atoi(mib)} << 20) / 16 / kNeighbourGroups;
}

// Its trainer may write: each pass makes a copy of what passes read, and one that is kept.
std::string KeptSpec() {
  std::string spec = GroupsSpec("kept", 1, kNeighbourGroups, NeighbourNumel(), R"(, "keepEvery": 1)");
  const std::string never = R"("trainersNeverWrite": true)";
  return spec.replace(spec.find(never), never.size(), R"("passCopies": true)");
}

std::string NeighbourSpec() { return GroupsSpec("neighbour", 1, kNeighbourGroups, NeighbourNumel(), ""); }

std::unique_ptr<Job> Attach(const std::string& address) {
  Job::Options options;
  options.spec_json = NeighbourSpec();
  options.rank = 0;
  options.address = address;
  std::unique_ptr<Job> job;
  CheckOrDie(Job::Attach(options, &job));
  return job;
}

void WriteAll(Job& job) {
  const std::vector<float> values(static_cast<size_t>(NeighbourNumel()), 1.0f);
  for (int g = 0; g < kNeighbourGroups; ++g) {
    CheckOrDie(job.WriteParameter(g, values.data(), 0, NeighbourNumel()));
  }
}

// One act: what comes before it, itself, and what comes behind it. The job is there from one to the next.
struct Act {
  std::function<void(std::unique_ptr<Job>&job, const std::string&address)> before, itself, behind;
};

const std::map<std::string, Act>& Acts() {
  using JobPtr = std::unique_ptr<Job>;
  const auto nothing = [](JobPtr&, const std::string&) {};
  const auto open = [](JobPtr& job, const std::string& address) { job = Attach(address); };
  const auto open_once = [](JobPtr& job, const std::string& address) {
    if (job == nullptr) job = AttachOrDie(NeighbourSpec(), 0, address);
  };
  const auto close = [](JobPtr& job, const std::string&) { CheckOrDie(std::exchange(job, nullptr)->Finish()); };
  static auto* const acts = new std::map<std::string, Act>{
      {"open", {nothing, open, close}},
      {"initial_values",
       {open,
        [](JobPtr& job, const std::string&) {
          WriteAll(*job);
          CheckOrDie(job->CommitParameters());
        },
        close}},
      {"optimizer",
       {[open_once](JobPtr& job, const std::string& address) {
          open_once(job, address);
          Backward(*job, kNeighbourGroups);
        },
        [](JobPtr& job, const std::string&) { StepAndWait(*job); }, nothing}},
      {"writeback",
       {open_once,
        [](JobPtr& job, const std::string&) { CheckOrDie(job->UnshardParams(true, [&job] { WriteAll(*job); })); },
        nothing}},
      // Given up in the middle of it: what was written is taken back, and the rank comes again.
      {"undo",
       {[open_once](JobPtr& job, const std::string& address) {
          open_once(job, address);
          shardd_full_params_options options{};
          options.struct_size = sizeof(options);
          options.recurse = 1;
          options.writeback = 1;
          options.group = -1;
          CheckOrDie(Status::Take(shardd_enter_full_params_with(job->c_job(), &options)));
          WriteAll(*job);
        },
        [](JobPtr& job, const std::string& address) {
          job = nullptr;
          job = Attach(address);
        },
        nothing}},
      {"kept",
       {[](JobPtr& job, const std::string& address) {
          if (job == nullptr) job = AttachOrDie(KeptSpec(), 0, address);
        },
        [](JobPtr& job, const std::string&) {
          CheckOrDie(job->EnterPass());
          CheckOrDie(job->LeavePass());
        },
        nothing}},
      {"close",
       {[](JobPtr& job, const std::string& address) { job = AttachOrDie(NeighbourSpec(), 0, address); }, close,
        nothing}},
  };
  for (const auto& [name, attack] : Attacks()) {
    acts->try_emplace(
        name, Act{[&attack = attack](JobPtr&, const std::string& address) { attack.before(address); },
                  [&attack = attack](JobPtr&, const std::string& address) { attack.itself(address); }, nothing});
  }
  return *acts;
}

void Say(int fd, char what) {
  if (write(fd, &what, 1) != 1) {
    std::_Exit(0);  // the other end has what it wanted
  }
}

int Neighbour(const std::string& name, const std::string& address, int from_victim, int to_victim) {
  const Act& act = Acts().at(name);
  std::unique_ptr<Job> job;
  const int times = Times();
  for (int i = 0; i < times; ++i) {
    act.before(job, address);
    Say(to_victim, 'b');
    char go = 0;
    if (read(from_victim, &go, 1) != 1) {
      return 0;
    }
    act.itself(job, address);
    Say(to_victim, 'e');
    act.behind(job, address);
  }
  return 0;
}

// The victim ---------------------------------------------------------------------------------------------------------

double VictimStepMs(Job& job) {
  const Clock::time_point begin = Clock::now();
  Backward(job, kVictimGroups);
  StepAndWait(job);
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

void Report(benchmark::State& state, const std::string& prefix, std::vector<double> ms) {
  std::sort(ms.begin(), ms.end());
  const auto at = [&ms](double share) {
    return ms[std::min(ms.size() - 1, static_cast<size_t>(share * static_cast<double>(ms.size())))];
  };
  state.counters[prefix + "p50_ms"] = at(0.5);
  state.counters[prefix + "p99_ms"] = at(0.99);
  state.counters[prefix + "max_ms"] = ms.back();
  state.counters[prefix + "steps"] = static_cast<double>(ms.size());
}

struct Beside {
  std::vector<double> ms;  // of the victim's steps while the acts last
  double acts_s = 0;
  bool ended = false;  // the neighbour came to its end
};

// The victim trains while a neighbour acts at the daemon of `address`.
Beside Measure(Job& victim, const std::string& act, const std::string& address) {
  Beside beside;
  int to_neighbour[2];
  int to_victim[2];
  if (pipe(to_neighbour) != 0 || pipe(to_victim) != 0) {
    return beside;
  }
  setenv("SHARDD_BENCH_ADDRESS", address.c_str(), 1);
  setenv("SHARDD_BENCH_ACT", act.c_str(), 1);
  setenv("SHARDD_BENCH_FROM", std::to_string(to_neighbour[0]).c_str(), 1);
  setenv("SHARDD_BENCH_TO", std::to_string(to_victim[1]).c_str(), 1);
  const pid_t child = fork();
  if (child == 0) {
    close(to_neighbour[1]);
    close(to_victim[0]);
    execl("/proc/self/exe", "isolation_bench", nullptr);
    _exit(127);
  }
  close(to_neighbour[0]);
  close(to_victim[1]);
  char said = 0;
  while (read(to_victim[0], &said, 1) == 1) {
    Say(to_neighbour[1], 'g');
    const Clock::time_point begin = Clock::now();
    pollfd ended{to_victim[0], POLLIN, 0};
    do {
      beside.ms.push_back(VictimStepMs(victim));
    } while (poll(&ended, 1, 0) == 0);
    beside.acts_s += std::chrono::duration<double>(Clock::now() - begin).count();
    if (read(to_victim[0], &said, 1) != 1) {
      break;
    }
  }
  int code = 0;
  waitpid(child, &code, 0);
  close(to_neighbour[1]);
  close(to_victim[0]);
  beside.ended = code == 0 && !beside.ms.empty();
  return beside;
}

// Three times: alone; while the neighbour does the same at a daemon of its own, which costs the machine as much; and
// beside it.
void BM_VictimBeside(benchmark::State& state, const std::string& act) {
  BenchDaemon daemon(1);
  BenchDaemon other(1);
  auto victim = AttachOrDie(GroupsSpec("victim", 1, kVictimGroups, (1 << 20) / kVictimGroups, ""), 0, daemon.address());
  for (int i = 0; i < 10; ++i) {  // memory comes with the first
    VictimStepMs(*victim);
  }
  std::vector<double> alone;
  for (int i = 0; i < kStepsAlone; ++i) {
    alone.push_back(VictimStepMs(*victim));
  }
  Beside elsewhere;
  Beside beside;
  for (auto _ : state) {
    elsewhere = Measure(*victim, act, other.address());
    beside = Measure(*victim, act, daemon.address());
  }
  if (!elsewhere.ended || !beside.ended) {
    state.SkipWithError("the neighbour did not come to its end");
    return;
  }
  Report(state, "alone_", std::move(alone));
  Report(state, "elsewhere_", std::move(elsewhere.ms));
  Report(state, "", std::move(beside.ms));
  state.counters["act_ms"] = 1e3 * beside.acts_s / Times();
  CheckOrDie(victim->Finish());
}
BENCHMARK_CAPTURE(BM_VictimBeside, open, "open")->Iterations(1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_VictimBeside, initial_values, "initial_values")->Iterations(1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_VictimBeside, optimizer, "optimizer")->Iterations(1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_VictimBeside, writeback, "writeback")->Iterations(1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_VictimBeside, undo, "undo")->Iterations(1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_VictimBeside, kept, "kept")->Iterations(1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_VictimBeside, close, "close")->Iterations(1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_VictimBeside, hostile_steps, "steps")->Iterations(1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_VictimBeside, hostile_questions, "questions")->Iterations(1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_VictimBeside, rapid_reset, "resets")->Iterations(1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_VictimBeside, pings, "pings")->Iterations(1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_VictimBeside, connections, "connections")->Iterations(1)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace shardd::bench

int main(int argc, char** argv) {
  if (const char* act = std::getenv("SHARDD_BENCH_ACT"); act != nullptr) {
    return shardd::bench::Neighbour(act, std::getenv("SHARDD_BENCH_ADDRESS"),
                                    std::atoi(std::getenv("SHARDD_BENCH_FROM")),
                                    std::atoi(std::getenv("SHARDD_BENCH_TO")));
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
