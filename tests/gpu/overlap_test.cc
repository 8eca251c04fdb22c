// What copies and sums of the daemon cost a trainer's kernels: its kernels compute in registers, in a process of their
// own, and the daemon copies meanwhile as unsharding, replicas and offload do, or adds gradients; and what it costs
// them where the trainer itself adds, in its own context (JobConfig.trainer_sums).

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/gpu/trainer.h"

namespace shardd::cuda {
namespace {

constexpr int kAsked = 0;     // measurements that the trainer is to make
constexpr int kMeasured = 1;  // and has made
constexpr int kTookNs = 2;    // the last one
constexpr int kAdded = 3;     // sums that it has made meanwhile
constexpr int64_t kSumNumel = int64_t{16} << 20;
constexpr int kRounds = 7;
constexpr uint64_t kEnd = 1'000'000;
constexpr int64_t kBytes = int64_t{256} << 20;
constexpr int kKernels = 8;  // of a measurement, some 70 ms

// A group's gradients of two ranks, as often as kept queued.
ReduceArgs SumOfTwo(const CudaSlab& slab) {
  char* const p = static_cast<char*>(slab.data());
  ReduceArgs args = {};
  args.sources[0] = p;
  args.sources[1] = p + kSumNumel * 2;
  args.source_count = 2;
  args.source_dtype = kBFloat16;
  args.scale = 0.5f;
  args.dst = reinterpret_cast<float*>(p + kSumNumel * 4);
  args.numel = kSumNumel;
  return args;
}

// Measures as often as it is asked; with an argument it adds gradients meanwhile, in every second round.
int Compute(Gpu& gpu, SharedPage& page, const std::vector<std::string>& arguments) {
  const CUkernel kernel = gpu.LoadKernel("shardd_test_compute");
  const CudaSlab out = gpu.Allocate(int64_t{8} << 20);
  const CudaSlab gradients = gpu.Allocate(kSumNumel * 8);
  gpu.Zero(gradients.data(), kSumNumel * 8);
  gpu.Wait();
  const CUstream sums = gpu.NewStream();
  std::vector<CUevent> events(3, nullptr);
  for (CUevent& event : events) {
    gpu.Check(gpu.driver()->EventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  }
  void* p = out.data();
  int fma_rounds = 250'000;
  void* params[] = {&p, &fma_rounds};
  const auto grid = static_cast<unsigned>(gpu.multiprocessors() * 8);
  uint64_t added = 0;
  const auto add = [&](size_t which) {
    gpu.Launch(SumOfTwo(gradients), 0, sums);
    gpu.Check(gpu.driver()->EventRecord(events[which], sums), "record");
    ++added;
  };
  const auto measure = [&](bool adds) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kKernels; ++i) {
      gpu.Check(
          gpu.driver()->LaunchKernel(cu::FunctionOf(kernel), grid, 1, 1, 256, 1, 1, 0, gpu.stream(), params, nullptr),
          "launch");
    }
    gpu.Check(gpu.driver()->EventRecord(events[2], gpu.stream()), "record");
    for (size_t which = 0; adds && which < 2; ++which) add(which);
    for (size_t next = 0; adds && gpu.driver()->EventQuery(events[2]) == CUDA_ERROR_NOT_READY;) {
      if (gpu.driver()->EventQuery(events[next]) != CUDA_SUCCESS) continue;
      add(next);
      next ^= 1;
    }
    gpu.Wait();
    const auto took = std::chrono::steady_clock::now() - begin;
    gpu.Check(gpu.driver()->StreamSynchronize(sums), "synchronise");
    return took;
  };
  measure(!arguments.empty());
  added = 0;
  for (uint64_t round = 1;; ++round) {
    if (!page.Await(kAsked, round)) return 2;
    if (page.Load(kAsked) >= kEnd) return 0;
    const auto took = measure(!arguments.empty() && round % 2 == 0);
    page.Store(kTookNs, static_cast<uint64_t>(std::chrono::nanoseconds(took).count()));
    page.Store(kAdded, added);
    page.Store(kMeasured, round);
  }
}
const RegisterTrainer kCompute("compute", &Compute);

class OverlapTest : public GpuTest {
 protected:
  // How much longer the trainer's kernels take while `copy` is under way, which puts one copy of kBytes on a stream;
  // one is always queued behind the one that runs. Rounds with and without alternate; the medians count.
  // Without any `copies` it is the trainer that adds.
  double Slowdown(const char* what, const std::vector<std::function<void(CUstream)>>& copies,
                  int64_t piece_bytes = kBytes) {
    SharedPage page(*gpu_);
    auto trainer =
        StartTrainer("compute", page, copies.empty() ? std::vector<std::string>{"adds"} : std::vector<std::string>());
    std::vector<CUstream> streams;
    std::vector<std::vector<CUevent>> events;
    for (size_t i = 0; i < copies.size(); ++i) {
      streams.push_back(gpu_->NewStream());
      events.emplace_back(2, nullptr);
      for (CUevent& event : events.back()) {
        gpu_->Check(gpu_->driver()->EventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
      }
    }
    std::vector<double> alone_ms, beside_ms;
    double copied_bytes = 0, copied_s = 0;
    for (uint64_t round = 1; round <= 2 * kRounds; ++round) {
      const bool beside = round % 2 == 0;
      const auto begin = std::chrono::steady_clock::now();
      int64_t count = 0;
      const auto put = [&](size_t which, int slot) {
        copies[which](streams[which]);
        gpu_->Check(gpu_->driver()->EventRecord(events[which][static_cast<size_t>(slot)], streams[which]), "record");
        ++count;
      };
      for (size_t which = 0; beside && which < copies.size(); ++which) {
        put(which, 0);
        put(which, 1);
      }
      page.Store(kAsked, round);
      std::vector<int> next(copies.size(), 0);
      while (page.Load(kMeasured) < round && std::chrono::steady_clock::now() - begin < std::chrono::seconds(20)) {
        for (size_t which = 0; beside && which < copies.size(); ++which) {
          if (gpu_->driver()->EventQuery(events[which][static_cast<size_t>(next[which])]) != CUDA_SUCCESS) continue;
          put(which, next[which]);
          next[which] ^= 1;
        }
      }
      for (CUstream stream : streams) gpu_->Check(gpu_->driver()->StreamSynchronize(stream), "synchronise");
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      if (page.Load(kMeasured) != round) {
        ADD_FAILURE() << "the trainer did not measure: " << trainer.Wait(absl::Seconds(1));
        return 0;
      }
      (beside ? beside_ms : alone_ms).push_back(static_cast<double>(page.Load(kTookNs)) / 1e6);
      if (beside) {
        copied_bytes += static_cast<double>(count * piece_bytes);
        copied_s += copies.empty() ? static_cast<double>(page.Load(kTookNs)) / 1e9 : took.count();
      }
    }
    page.Store(kAsked, kEnd);
    EXPECT_EQ(trainer.Wait(), 0);
    if (copies.empty()) copied_bytes = static_cast<double>(static_cast<int64_t>(page.Load(kAdded)) * piece_bytes);
    std::sort(alone_ms.begin(), alone_ms.end());
    std::sort(beside_ms.begin(), beside_ms.end());
    const double alone = alone_ms[kRounds / 2], beside = beside_ms[kRounds / 2];
    std::printf("| %s | %.2f | %.2f | %.3f (alone %.2f to %.2f) | %.0f |\n", what, alone, beside, beside / alone,
                alone_ms.front(), alone_ms.back(), copied_bytes / copied_s / 1e9);
    return beside / alone;
  }
  std::function<void(CUstream)> Copy(const void* from, void* to) {
    return [this, from, to](CUstream stream) {
      gpu_->Check(gpu_->driver()->MemcpyAsync(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from),
                                              kBytes, stream),
                  "cuMemcpyAsync");
    };
  }
};

TEST_F(OverlapTest, CopiesBetweenHostAndGpuLeaveATrainersKernelsAlone) {
  const CudaSlab slab = gpu_->Allocate(2 * kBytes);
  std::vector<char> host(2 * kBytes, 1);
  gpu_->Check(gpu_->driver()->MemHostRegister(host.data(), host.size(), CU_MEMHOSTREGISTER_PORTABLE), "register");
  char* const device = static_cast<char*>(slab.data());
  const double to_gpu = Slowdown("host to GPU", {Copy(host.data(), device)});
  const double to_host = Slowdown("GPU to host", {Copy(device, host.data())});
  const double both = Slowdown("both ways", {Copy(host.data(), device), Copy(device + kBytes, host.data() + kBytes)});
  gpu_->Check(gpu_->driver()->MemHostUnregister(host.data()), "unregister");
  EXPECT_LT(to_gpu, 1.03);
  EXPECT_LT(to_host, 1.03);
  EXPECT_LT(both, 1.03);
}

// They are work of the context, as kernels are: without MPS the GPU gives contexts their turns, some 2 ms each.
TEST_F(OverlapTest, GpuCopiesLeaveKernelsAloneUnderMpsElseTakeTurns) {
  const CudaSlab slab = gpu_->Allocate(2 * kBytes);
  char* const device = static_cast<char*>(slab.data());
  gpu_->Zero(device, 2 * kBytes);
  gpu_->Wait();
  const double slowdown = Slowdown("GPU to the same GPU", {Copy(device, device + kBytes)});
  const char* const mps = std::getenv("SHARDD_GPU_MPS");
  EXPECT_LT(slowdown, mps != nullptr && std::strcmp(mps, "on") == 0 ? 1.03 : 4);
}

// What JobConfig.trainer_sums is for: the same sums, by the daemon and by the trainer itself.
TEST_F(OverlapTest, SumsByTheTrainerCostKernelsLessThanTheDaemons) {
  const CudaSlab slab = gpu_->Allocate(kSumNumel * 8);
  gpu_->Zero(slab.data(), kSumNumel * 8);
  gpu_->Wait();
  const double by_daemon = Slowdown("sums by the daemon",
                                    {[&](CUstream stream) { gpu_->Launch(SumOfTwo(slab), 0, stream); }}, kSumNumel * 8);
  const double by_trainer = Slowdown("sums by the trainer", {}, kSumNumel * 8);
  const char* const mps = std::getenv("SHARDD_GPU_MPS");
  if (mps != nullptr && std::strcmp(mps, "on") == 0) {
    EXPECT_LT(by_trainer, by_daemon * 1.1);
  } else {
    EXPECT_LT(by_trainer, by_daemon);
  }
}

}  // namespace
}  // namespace shardd::cuda
