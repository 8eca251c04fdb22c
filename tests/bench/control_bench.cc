// What control costs by the ring with shared words and over gRPC alone (SHARDD_CONTROL), in the same run: time and
// round trips of an unshard, and of a small step. `round_trips` counts waits that were not satisfied at once.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/bench/bench_daemon.h"

namespace shardd::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kGroups = 12;
constexpr char kPooled[] = R"(, "unshardMode": "UNSHARD_MODE_POOLED", "maxInflightUnshards": 1)";

// Small groups: what moves is control.
std::unique_ptr<Job> AttachBy(const char* control, const std::string& config, const BenchDaemon& daemon) {
  setenv("SHARDD_CONTROL", control, 1);
  auto job = AttachOrDie(GroupsSpec(control, 1, kGroups, 1 << 10, config), 0, daemon.address());
  unsetenv("SHARDD_CONTROL");
  return job;
}

uint64_t Waits(const Job& job) {
  shardd_counters counters{};
  counters.struct_size = sizeof(counters);
  CheckOrDie(Status::Take(shardd_get_counters(job.c_job(), &counters)));
  return counters.waits;
}

struct Cost {
  double microseconds = 0;  // median
  double round_trips = 0;   // mean
  double daemon_microseconds = 0;
};
template <typename F>
Cost CostOf(const BenchDaemon& daemon, const Job& job, int count, F&& body) {
  body();  // connections and pages are there
  std::vector<double> microseconds;
  const uint64_t waits = Waits(job);
  const double cpu = daemon.CpuSeconds();
  for (int i = 0; i < count; ++i) {
    const Clock::time_point begin = Clock::now();
    body();
    microseconds.push_back(1e6 * std::chrono::duration<double>(Clock::now() - begin).count());
  }
  Cost cost;
  cost.daemon_microseconds = 1e6 * (daemon.CpuSeconds() - cpu) / count;
  cost.round_trips = static_cast<double>(Waits(job) - waits) / count;
  std::nth_element(microseconds.begin(), microseconds.begin() + count / 2, microseconds.end());
  cost.microseconds = microseconds[static_cast<size_t>(count / 2)];
  return cost;
}

void Report(benchmark::State& state, const char* control, const Cost& cost) {
  state.counters[std::string("us_by_") + control] = cost.microseconds;
  state.counters[std::string("round_trips_by_") + control] = cost.round_trips;
  state.counters[std::string("daemon_us_by_") + control] = cost.daemon_microseconds;
}

// Unshard, wait, reshard of the next group, which is copied into the pool: the daemon has to be asked each time.
void BM_UnshardPooledByControl(benchmark::State& state) {
  for (auto _ : state) {
    for (const char* control : {"ring", "grpc"}) {
      BenchDaemon daemon(1);
      auto job = AttachBy(control, kPooled, daemon);
      int next = 0;
      Report(state, control, CostOf(daemon, *job, 500, [&] {
               ParameterGroup group = job->group(next);
               next = (next + 1) % kGroups;
               CheckOrDie(group.Unshard(SHARDD_FORWARD));
               CheckOrDie(group.Reshard());
             }));
      CheckOrDie(job->Finish());
    }
  }
}
BENCHMARK(BM_UnshardPooledByControl)->Iterations(1)->Unit(benchmark::kMillisecond);

// The same where the parameters are where they always are, and nobody is asked.
void BM_UnshardZeroCopyByControl(benchmark::State& state) {
  for (auto _ : state) {
    for (const char* control : {"ring", "grpc"}) {
      BenchDaemon daemon(1);
      auto job = AttachBy(control, "", daemon);
      ParameterGroup group = job->group(3);
      Report(state, control, CostOf(daemon, *job, 20'000, [&] {
               CheckOrDie(group.Unshard(SHARDD_FORWARD));
               CheckOrDie(group.Reshard());
             }));
      CheckOrDie(job->Finish());
    }
  }
}
BENCHMARK(BM_UnshardZeroCopyByControl)->Iterations(1)->Unit(benchmark::kMillisecond);

// A step of one rank over all groups, with nothing computed.
void BM_StepByControl(benchmark::State& state) {
  for (auto _ : state) {
    for (const char* control : {"ring", "grpc"}) {
      BenchDaemon daemon(1);
      auto job = AttachBy(control, "", daemon);
      Report(state, control, CostOf(daemon, *job, 100, [&] {
               for (int g = 0; g < kGroups; ++g) {
                 ParameterGroup group = job->group(g);
                 CheckOrDie(group.Unshard(SHARDD_FORWARD));
                 CheckOrDie(group.Reshard());
               }
               for (int g = kGroups - 1; g >= 0; --g) {
                 ParameterGroup group = job->group(g);
                 CheckOrDie(group.Unshard(SHARDD_BACKWARD));
                 CheckOrDie(group.WaitGradientSlot());
                 CheckOrDie(group.SubmitGradients());
                 CheckOrDie(group.Reshard());
               }
               CheckOrDie(job->BackwardDone(/*last=*/true));
               StepAndWait(*job);
             }));
      CheckOrDie(job->Finish());
    }
  }
}
BENCHMARK(BM_StepByControl)->Iterations(1)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace shardd::bench

BENCHMARK_MAIN();
