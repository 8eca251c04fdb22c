// The whole system, daemon and ranks as processes: what a request costs the trainer. Each figure stands beside a
// baseline taken in the same run; `ratio` is the subject's figure over the baseline's.

#include <benchmark/benchmark.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/shm/trace_ring.h"
#include "grpcpp/grpcpp.h"
#include "shardd/v1/jobs.grpc.pb.h"
#include "tests/bench/bench_daemon.h"

namespace shardd::bench {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// One write and one read of an eventfd: the cheapest pair of system calls that a request could consist of.
double EventfdSeconds() {
  const int fd = eventfd(0, EFD_CLOEXEC);
  constexpr int kCalls = 20'000;
  const Clock::time_point begin = Clock::now();
  for (int i = 0; i < kCalls; ++i) {
    uint64_t value = 1;
    benchmark::DoNotOptimize(write(fd, &value, sizeof(value)));
    benchmark::DoNotOptimize(read(fd, &value, sizeof(value)));
  }
  const double seconds = SecondsSince(begin) / kCalls;
  close(fd);
  return seconds;
}

// memcpy of `bytes` in `threads` equal parts, median of several.
double CopySeconds(size_t bytes, int threads) {
  std::vector<char> from(bytes, 1);
  std::vector<char> to(bytes, 2);
  std::vector<double> seconds;
  for (int i = 0; i < 9; ++i) {
    const Clock::time_point begin = Clock::now();
    std::vector<std::thread> workers;
    const size_t part = bytes / static_cast<size_t>(threads);
    for (int t = 0; t < threads; ++t) {
      workers.emplace_back([&, t] {
        std::memcpy(to.data() + part * static_cast<size_t>(t), from.data() + part * static_cast<size_t>(t), part);
      });
    }
    for (std::thread& worker : workers) {
      worker.join();
    }
    seconds.push_back(SecondsSince(begin));
    benchmark::DoNotOptimize(to.data());
  }
  return Median(seconds);
}

// Unshard, wait, reshard of a group whose version is there: what a trainer pays per group and direction.
void BM_UnshardReshardZeroCopy(benchmark::State& state) {
  BenchDaemon daemon(1);
  auto job = AttachOrDie(GroupsSpec("zero-copy", 1, 12, 1 << 16, ""), 0, daemon.address());
  ParameterGroup group = job->group(3);
  const double baseline = EventfdSeconds();
  const Clock::time_point begin = Clock::now();
  for (auto _ : state) {
    CheckOrDie(group.Unshard(SHARDD_FORWARD));
    benchmark::DoNotOptimize(job->parameter_data(3));
    CheckOrDie(group.Reshard());
  }
  const double per_pair = SecondsSince(begin) / static_cast<double>(state.iterations());
  shardd_counters counters{};
  counters.struct_size = sizeof(counters);
  CheckOrDie(Status::Take(shardd_get_counters(job->c_job(), &counters)));
  state.counters["ratio_to_eventfd_pair"] = per_pair / baseline;
  state.counters["doorbells_per_pair"] =
      static_cast<double>(counters.doorbells) / static_cast<double>(state.iterations());
  CheckOrDie(job->Finish());
}
BENCHMARK(BM_UnshardReshardZeroCopy)->Iterations(200'000)->Unit(benchmark::kMicrosecond);

// The same while somebody traces the job, in bursts that the trace ring holds, with time for the daemon to take them in
// between; beside bursts that nobody traces.
void BM_UnshardReshardTraced(benchmark::State& state) {
  constexpr int kPairs = 500;
  constexpr int kCallsOfPair = 3;
  static_assert(kPairs * kCallsOfPair < kTraceRecords);
  BenchDaemon daemon(1);
  auto job = AttachOrDie(GroupsSpec("traced", 1, 12, 1 << 16, ""), 0, daemon.address());
  ParameterGroup group = job->group(3);
  const auto burst = [&group] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < kPairs; ++i) {
      CheckOrDie(group.Unshard(SHARDD_FORWARD));
      CheckOrDie(group.Reshard());
    }
    return SecondsSince(begin) / kPairs;
  };
  std::vector<double> untraced;
  for (int64_t i = 0; i < state.max_iterations; ++i) {
    untraced.push_back(burst());
  }
  const auto stub = v1::JobsService::NewStub(grpc::CreateChannel(daemon.address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::TraceJobRequest request;
  request.set_job("traced");
  request.set_timeout_ms(600'000);
  const auto reader = stub->TraceJob(&context, request);
  v1::TraceJobResponse message;
  reader->Read(&message);
  int64_t spans = 0;
  std::thread taker([&] {
    while (reader->Read(&message)) {
      spans += message.spans().spans_size();
    }
  });
  std::vector<double> traced;
  for (auto _ : state) {
    traced.push_back(burst());
  }
  CheckOrDie(job->Finish());  // ends the trace
  taker.join();
  const int64_t calls = state.max_iterations * kPairs * kCallsOfPair;
  state.counters["us_per_pair_traced"] = 1e6 * Median(traced);
  state.counters["us_per_pair_untraced"] = 1e6 * Median(untraced);
  state.counters["ns_added_per_call"] = 1e9 * (Median(traced) - Median(untraced)) / kCallsOfPair;
  state.counters["share_of_calls_in_the_trace"] = static_cast<double>(spans) / static_cast<double>(calls);
}
BENCHMARK(BM_UnshardReshardTraced)->Iterations(100)->Unit(benchmark::kMillisecond);

// Records per second on one session, and the daemon's processor time for each.
void BM_ControlMessages(benchmark::State& state) {
  BenchDaemon daemon(1);
  auto job = AttachOrDie(GroupsSpec("control", 1, 12, 1 << 10, ""), 0, daemon.address());
  ParameterGroup group = job->group(0);
  const double baseline = EventfdSeconds();
  const double cpu = daemon.CpuSeconds();
  const Clock::time_point begin = Clock::now();
  for (auto _ : state) {
    CheckOrDie(group.UnshardAsync(SHARDD_FORWARD));
    CheckOrDie(group.Reshard());
  }
  const double seconds = SecondsSince(begin);
  const double messages = 2 * static_cast<double>(state.iterations());
  state.counters["messages_per_second"] = messages / seconds;
  state.counters["daemon_cpu_us_per_message"] = 1e6 * (daemon.CpuSeconds() - cpu) / messages;
  state.counters["ratio_to_eventfd_pair"] = seconds / messages / baseline;
  CheckOrDie(job->Finish());
}
BENCHMARK(BM_ControlMessages)->Iterations(400'000)->Unit(benchmark::kMicrosecond);

// POOLED, not prefetched: the group is copied into a slot on request; against memcpy of the same bytes.
void BM_UnshardPooled(benchmark::State& state) {
  constexpr int64_t kNumel = 8 << 20;
  BenchDaemon daemon(1);
  auto job = AttachOrDie(
      GroupsSpec("pooled", 1, 4, kNumel, R"(, "unshardMode": "UNSHARD_MODE_POOLED", "maxInflightUnshards": 1)"), 0,
      daemon.address());
  const double baseline = CopySeconds(kNumel * 4, 1);
  int next = 0;
  std::vector<double> seconds;
  for (auto _ : state) {
    ParameterGroup group = job->group(next);
    next = (next + 1) % 4;  // never the one that its slot still holds
    const Clock::time_point begin = Clock::now();
    CheckOrDie(group.Unshard(SHARDD_FORWARD));
    seconds.push_back(SecondsSince(begin));
    CheckOrDie(group.Reshard());
  }
  state.counters["share_of_memcpy_bandwidth"] = baseline / Median(seconds);
  state.counters["GB_per_second"] = kNumel * 4 / Median(seconds) / 1e9;
  CheckOrDie(job->Finish());
}
BENCHMARK(BM_UnshardPooled)->Iterations(24)->Unit(benchmark::kMillisecond);

// POOLED with forward prefetch, once the order is known: while the trainer computes (1 ms) the next group is copied,
// and the request finds it there. The daemon still has to be asked, because it may have dropped what nobody had asked
// for.
void BM_UnshardPooledPrefetched(benchmark::State& state) {
  constexpr int64_t kNumel = 1 << 20;
  constexpr int kGroups = 12;
  BenchDaemon daemon(1);
  auto job = AttachOrDie(
      GroupsSpec("prefetched", 1, kGroups, kNumel,
                 R"(, "unshardMode": "UNSHARD_MODE_POOLED", "forwardPrefetch": true, "maxInflightUnshards": 2)"),
      0, daemon.address());
  const double baseline = EventfdSeconds();
  std::vector<double> seconds;
  auto forward = [&] {
    for (int g = 0; g < kGroups; ++g) {
      const Clock::time_point begin = Clock::now();
      CheckOrDie(job->group(g).Unshard(SHARDD_FORWARD));
      if (g > 0) {
        seconds.push_back(SecondsSince(begin));
      }
      const Clock::time_point compute = Clock::now();
      while (SecondsSince(compute) < 1e-3) {
      }
      CheckOrDie(job->group(g).Reshard());
    }
    StepAndWait(*job);
  };
  forward();  // recorded
  seconds.clear();
  for (auto _ : state) {
    forward();
  }
  state.counters["us_per_unshard"] = 1e6 * Median(seconds);
  state.counters["ratio_to_eventfd_pair"] = Median(seconds) / baseline;
  state.counters["ratio_to_memcpy_of_the_group"] = Median(seconds) / CopySeconds(kNumel * 4, 1);
  CheckOrDie(job->Finish());
}
BENCHMARK(BM_UnshardPooledPrefetched)->Iterations(20)->Unit(benchmark::kMillisecond);

constexpr int64_t kReduceNumel = 16 << 20;
std::string ReduceSpec() { return GroupsSpec("reduce", 2, 1, kReduceNumel, ""); }

void OneBackward(Job& job) {
  ParameterGroup group = job.group(0);
  CheckOrDie(group.Unshard(SHARDD_FORWARD));
  CheckOrDie(group.Reshard());
  CheckOrDie(group.SubmitGradients());
  CheckOrDie(job.BackwardDone(false));
  CheckOrDie(group.WaitGradientSlot());
}

// A rank may not finish in the middle of a step.
void StepAndFinish(Job& job) {
  StepAndWait(job);
  CheckOrDie(job.Finish());
}

// The other rank of BM_GradientReduction.
int OtherRank(const char* address, int backwards) {
  auto job = AttachOrDie(ReduceSpec(), 1, address);
  CheckOrDie(job->group(0).WaitGradientSlot());
  std::memset(job->gradient_data(0), 0, kReduceNumel * 4);
  for (int i = 0; i < backwards; ++i) {
    OneBackward(*job);
  }
  StepAndFinish(*job);
  return 0;
}

// Two ranks submit 64 MiB each; from submission until the slots are free again, against memcpy of the bytes read, on as
// many threads as there are devices.
void BM_GradientReduction(benchmark::State& state) {
  constexpr int64_t kNumel = kReduceNumel;
  const int iterations = static_cast<int>(state.max_iterations);
  BenchDaemon daemon(2);
  const std::string spec = ReduceSpec();
  // The other rank is a process of its own: this program again (main).
  setenv("SHARDD_BENCH_ADDRESS", daemon.address().c_str(), 1);
  setenv("SHARDD_BENCH_BACKWARDS", std::to_string(iterations + 1).c_str(), 1);
  const pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "system_bench", nullptr);
    _exit(127);
  }
  auto job = AttachOrDie(spec, 0, daemon.address());
  CheckOrDie(job->group(0).WaitGradientSlot());
  std::memset(job->gradient_data(0), 0, kNumel * 4);
  OneBackward(*job);  // the first touch of the gradient shards, and both ranks are there
  std::vector<double> seconds;
  for (auto _ : state) {
    const Clock::time_point begin = Clock::now();
    OneBackward(*job);
    seconds.push_back(SecondsSince(begin));
  }
  StepAndFinish(*job);
  waitpid(child, nullptr, 0);
  const double baseline = CopySeconds(2 * kNumel * 4, 2);
  state.counters["share_of_memcpy_bandwidth"] = baseline / Median(seconds);
  state.counters["GB_per_second_read"] = 2 * kNumel * 4 / Median(seconds) / 1e9;
}
BENCHMARK(BM_GradientReduction)->Iterations(20)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace shardd::bench

int main(int argc, char** argv) {
  if (const char* address = std::getenv("SHARDD_BENCH_ADDRESS"); address != nullptr) {
    return shardd::bench::OtherRank(address, std::atoi(std::getenv("SHARDD_BENCH_BACKWARDS")));
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
