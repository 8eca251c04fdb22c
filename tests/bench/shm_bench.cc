// Costs of what lies under every step: a wait that is satisfied already, a wake of another process, commands through
// the ring; each beside a raw eventfd ping-pong of the same run. The last table prints the ratios.

#include <benchmark/benchmark.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "absl/time/clock.h"
#include "common/shm/session_view.h"
#include "common/shm/slab.h"
#include "common/shm/timeline.h"

namespace shardd {
namespace {

constexpr int64_t kMasksOffset = kPageBytes + kRingBytes;

// The two objects of a session, and a forked process as the daemon's side.
class Session {
 public:
  Session()
      : memory_slab_(*Slab::Create("session", SlabBacking::kSealedMemfd, kMasksOffset + kPageBytes)),
        page_slab_(*Slab::Create("page", SlabBacking::kFrozenMemfd, DaemonPageBytes(1, 1))),
        memory(memory_slab_->data(), kPageBytes, kMasksOffset),
        page(page_slab_->data(), 1, 1),
        daemon_waiting(page.page().awake) {}
  ~Session() { Stop(); }
  void StartDaemon(const std::function<void()>& body) {
    pid_ = fork();
    if (pid_ == 0) {
      body();
      _exit(0);
    }
  }
  void Stop() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
      pid_ = -1;
    }
  }

 private:
  std::unique_ptr<Slab> memory_slab_;
  std::unique_ptr<Slab> page_slab_;
  pid_t pid_ = -1;

 public:
  SessionMemoryView memory;
  DaemonPageView page;
  // The daemon sleeps on the client's word here, which it does on a doorbell otherwise; any word of its page will do.
  std::atomic<uint32_t>& daemon_waiting;
};

absl::Duration Limit() { return absl::InfiniteDuration(); }

// The part of the daemon's loop that this is about: take records in order, check, copy out, say so.
void ConsumeRecords(Session& session, absl::Duration spin) {
  for (uint64_t next = 0;;) {
    TimelineWait(session.memory.page().submitted, next + 1, session.daemon_waiting, Limit(), spin);
    const uint64_t submitted = session.memory.page().submitted.load(std::memory_order_acquire);
    for (; next < submitted; ++next) {
      const CommandRecord record = session.memory.record(next);
      if (record.sequence != next) {
        _exit(1);
      }
    }
    TimelineStore(session.page.page().consumed, next, &session.memory.page().waiting);
  }
}

void WriteRecord(Session& session, uint64_t n) {
  CommandRecord& record = session.memory.record(n);
  record = CommandRecord{};
  record.sequence = n;
  record.opcode = Opcode::kUnshard;
}

void BM_WaitSatisfied(benchmark::State& state) {
  TimelineWord word{100};
  std::atomic<uint32_t> waiting{0};
  for (auto _ : state) {
    benchmark::DoNotOptimize(TimelineWait(word, 7, waiting, Limit()));
  }
}
BENCHMARK(BM_WaitSatisfied);

void BM_StoreNobodyWaits(benchmark::State& state) {
  TimelineWord word{0};
  const std::atomic<uint32_t> waiting{0};
  uint64_t n = 0;
  for (auto _ : state) {
    TimelineStore(word, ++n, &waiting);
  }
}
BENCHMARK(BM_StoreNobodyWaits);

// One client thread alone: what a command costs the trainer while the daemon is busy elsewhere.
void BM_RingWriteOnly(benchmark::State& state) {
  Session session;
  uint64_t n = 0;
  for (auto _ : state) {
    WriteRecord(session, n);
    session.memory.page().submitted.store(++n, std::memory_order_release);
  }
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(BM_RingWriteOnly);

// Write and read of every record, both processes running; in batches, as prefetching clients send them.
void BM_RingThroughput(benchmark::State& state) {
  Session session;
  session.StartDaemon([&session] { ConsumeRecords(session, absl::Microseconds(20)); });
  constexpr uint64_t kBatch = 32;
  uint64_t n = 0;
  for (auto _ : state) {
    if (n + kBatch > kRingRecords) {  // the ring's own rule: a place is free once its record is consumed
      TimelineWait(session.page.page().consumed, n + kBatch - kRingRecords, session.memory.page().waiting, Limit());
    }
    for (uint64_t end = n + kBatch; n < end; ++n) {
      WriteRecord(session, n);
    }
    TimelineStore(session.memory.page().submitted, n, &session.daemon_waiting);
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(kBatch));
}
BENCHMARK(BM_RingThroughput)->UseRealTime();

// One record there, its `consumed` back; the argument is the spin in microseconds on both sides. 0: a wake each way.
void BM_RingRoundTrip(benchmark::State& state) {
  Session session;
  const absl::Duration spin = absl::Microseconds(state.range(0));
  session.StartDaemon([&session, spin] { ConsumeRecords(session, spin); });
  uint64_t n = 0;
  for (auto _ : state) {
    WriteRecord(session, n);
    TimelineStore(session.memory.page().submitted, ++n, &session.daemon_waiting);
    TimelineWait(session.page.page().consumed, n, session.memory.page().waiting, Limit(), spin);
  }
}
BENCHMARK(BM_RingRoundTrip)->Arg(0)->Arg(20)->UseRealTime();

// Baseline: two eventfds, blocking reads, nothing else.
void BM_EventfdRoundTrip(benchmark::State& state) {
  const int there = eventfd(0, EFD_CLOEXEC), back = eventfd(0, EFD_CLOEXEC);
  Session session;
  session.StartDaemon([there, back] {
    uint64_t value;
    while (read(there, &value, sizeof(value)) == sizeof(value) && write(back, &value, sizeof(value)) > 0) {
    }
  });
  const uint64_t one = 1;
  uint64_t value;
  for (auto _ : state) {
    if (write(there, &one, sizeof(one)) < 0 || read(back, &value, sizeof(value)) < 0) {
      state.SkipWithError("eventfd broke");
      break;
    }
  }
  session.Stop();
  close(there);
  close(back);
}
BENCHMARK(BM_EventfdRoundTrip)->UseRealTime();

// Both in turns within one measurement, so that a machine that speeds up or slows down does so for both.
double RoundTripNs(const std::function<void()>& one, int count) {
  const int64_t start = absl::GetCurrentTimeNanos();
  for (int i = 0; i < count; ++i) {
    one();
  }
  return static_cast<double>(absl::GetCurrentTimeNanos() - start) / count;
}

void PrintRatios() {
  constexpr int kTurns = 21, kCount = 500;
  const int there = eventfd(0, EFD_CLOEXEC), back = eventfd(0, EFD_CLOEXEC);
  Session raw;
  raw.StartDaemon([there, back] {
    uint64_t value;
    while (read(there, &value, sizeof(value)) == sizeof(value) && write(back, &value, sizeof(value)) > 0) {
    }
  });
  std::printf(
      "\nround trip to another process, ratio to a raw eventfd ping-pong (median of %d turns; smaller is better)\n",
      kTurns);
  for (const int spin_us : {0, 20}) {
    const absl::Duration spin = absl::Microseconds(spin_us);
    Session session;
    session.StartDaemon([&session, spin] { ConsumeRecords(session, spin); });
    uint64_t n = 0;
    std::vector<double> ratios, ring_ns, event_ns;
    for (int turn = 0; turn < kTurns; ++turn) {
      event_ns.push_back(RoundTripNs(
          [&] {
            uint64_t value = 1;
            if (write(there, &value, sizeof(value)) < 0 || read(back, &value, sizeof(value)) < 0) {
              std::abort();
            }
          },
          kCount));
      ring_ns.push_back(RoundTripNs(
          [&] {
            WriteRecord(session, n);
            TimelineStore(session.memory.page().submitted, ++n, &session.daemon_waiting);
            TimelineWait(session.page.page().consumed, n, session.memory.page().waiting, Limit(), spin);
          },
          kCount));
      ratios.push_back(ring_ns.back() / event_ns.back());
    }
    for (std::vector<double>* values : {&ratios, &ring_ns, &event_ns}) {
      std::sort(values->begin(), values->end());
    }
    std::printf("  ring record, spin %2d us: %8.2f us   eventfd %8.2f us   ratio %.3f [%.3f-%.3f]\n", spin_us,
                ring_ns[kTurns / 2] / 1e3, event_ns[kTurns / 2] / 1e3, ratios[kTurns / 2], ratios.front(),
                ratios.back());
  }
  close(there);
  close(back);
}

}  // namespace
}  // namespace shardd

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 1;
  }
  benchmark::RunSpecifiedBenchmarks();
  shardd::PrintRatios();
  return 0;
}
