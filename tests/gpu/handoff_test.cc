// How long a timeline's hand-off takes between two processes on one GPU, as the product does it: 64-bit words in a page
// that both have registered, streams that wait for a word and write one, and hosts that look and store.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/gpu/trainer.h"

namespace shardd::cuda {
namespace {

constexpr int kGo = 0;     // the daemon's host writes it, the trainer's stream waits for it
constexpr int kDone = 1;   // the trainer's stream writes it: its `done`
constexpr int kNext = 2;   // the daemon's stream, which waits for kDone, writes it
constexpr int kArmed = 3;  // rounds that the trainer has put into its stream
constexpr int kStop = 4;   // a load beside it is to end
constexpr int kRunning = 5;
constexpr int kArm = 6;  // rounds that the trainer may put there
constexpr int kBatch = 100;

// Rounds of a stream: wait for `from`, write `to`. A queue holds some 1000 operations.
void Enqueue(Gpu& gpu, CUstream stream, const SharedPage& page, int from, int to, uint64_t first, uint64_t last) {
  for (uint64_t round = first; round <= last; ++round) {
    gpu.Check(gpu.driver()->StreamWaitValue64(stream, page.Address(from), round, CU_STREAM_WAIT_VALUE_GEQ), "wait");
    gpu.Check(gpu.driver()->StreamWriteValue64(stream, page.Address(to), round, CU_STREAM_WRITE_VALUE_DEFAULT),
              "write");
  }
}

// Arguments: rounds, and whether a kernel of this process computes meanwhile on another stream.
int HandOff(Gpu& gpu, SharedPage& page, const std::vector<std::string>& arguments) {
  int rounds = 0;
  if (!absl::SimpleAtoi(arguments[0], &rounds)) return 1;
  const CUstream stream = gpu.NewStream();
  std::thread load;
  if (arguments[1] == "1") {
    const CUkernel kernel = gpu.LoadKernel("shardd_test_compute");
    const CudaSlab out = gpu.Allocate(int64_t{8} << 20);
    float* p = static_cast<float*>(out.data());
    int fma_rounds = 100'000;  // some 0.3 ms
    void* params[] = {&p, &fma_rounds};
    const auto grid = static_cast<unsigned>(gpu.multiprocessors() * 4);
    // As a trainer does: some kernels ahead, never a queue without end.
    load = std::thread([&] {
      CUcontext context = nullptr;
      gpu.Check(gpu.driver()->DevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
      gpu.Check(gpu.driver()->CtxSetCurrent(context), "cuCtxSetCurrent");
      while (page.Load(kStop) == 0) {
        for (int i = 0; i < 8; ++i) {
          gpu.Check(gpu.driver()->LaunchKernel(cu::FunctionOf(kernel), grid, 1, 1, 256, 1, 1, 0, gpu.stream(), params,
                                               nullptr),
                    "k");
        }
        gpu.Wait();
        page.Store(kRunning, page.Load(kRunning) + 1);
      }
    });
    while (page.Load(kRunning) < 3) std::this_thread::yield();
    int result = 0;
    for (uint64_t first = 1; first <= static_cast<uint64_t>(rounds) && result == 0; first += kBatch) {
      if (!page.Await(kArm, first)) result = 2;
      if (result == 0) Enqueue(gpu, stream, page, kGo, kDone, first, first + kBatch - 1);
      page.Store(kArmed, first + kBatch - 1);
    }
    if (result == 0) gpu.Check(gpu.driver()->StreamSynchronize(stream), "cuStreamSynchronize");
    page.Store(kStop, 1);
    load.join();
    return result;
  }
  for (uint64_t first = 1; first <= static_cast<uint64_t>(rounds); first += kBatch) {
    if (!page.Await(kArm, first)) return 2;
    Enqueue(gpu, stream, page, kGo, kDone, first, first + kBatch - 1);
    page.Store(kArmed, first + kBatch - 1);
  }
  gpu.Check(gpu.driver()->StreamSynchronize(stream), "cuStreamSynchronize");
  return 0;
}
const RegisterTrainer kHandOff("hand_off", &HandOff);

struct Times {
  std::vector<double> trip_us, hand_off_us;
};

double At(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
}

class HandOffTest : public GpuTest {
 protected:
  Times Measure(int rounds, bool with_load, std::chrono::microseconds pause) {
    SharedPage page(*gpu_);
    auto trainer = StartTrainer("hand_off", page, {absl::StrCat(rounds), with_load ? "1" : "0"});
    const CUstream stream = gpu_->NewStream();
    Times times;
    using Clock = std::chrono::steady_clock;
    const auto us = [](Clock::duration d) { return std::chrono::duration<double, std::micro>(d).count(); };
    for (uint64_t round = 1; round <= static_cast<uint64_t>(rounds); ++round) {
      if (round % kBatch == 1) {
        page.Store(kArm, round);
        Enqueue(*gpu_, stream, page, kDone, kNext, round, round + kBatch - 1);
        if (!page.Await(kArmed, round + kBatch - 1)) {
          ADD_FAILURE() << "the trainer did not arm round " << round << ": " << trainer.Wait();
          break;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(2));  // both have come to their first wait
      }
      if (pause.count() > 0) std::this_thread::sleep_for(pause);
      const auto begin = Clock::now();
      page.Store(kGo, round);
      const bool done = page.Await(kDone, round);
      const auto trip = Clock::now();
      const bool next = done && page.Await(kNext, round);
      const auto end = Clock::now();
      if (!next) {
        ADD_FAILURE() << "round " << round << ": " << (done ? "the daemon's" : "the trainer's")
                      << " stream did not go on";
        break;
      }
      times.trip_us.push_back(us(trip - begin));
      times.hand_off_us.push_back(us(end - trip));
    }
    EXPECT_EQ(trainer.Wait(absl::Seconds(40)), 0);
    gpu_->Check(gpu_->driver()->StreamSynchronize(stream), "cuStreamSynchronize");
    return times;
  }
  static void Print(const char* what, const Times& times) {
    for (const auto& [name, values] : {std::pair{"daemon's host to trainer's stream and back", &times.trip_us},
                                       std::pair{"trainer's stream to daemon's stream", &times.hand_off_us}}) {
      std::printf("| %s, %s | %.1f | %.1f | %.1f |\n", name, what, At(*values, 0.5), At(*values, 0.99), At(*values, 1));
    }
  }
};

TEST_F(HandOffTest, AStreamHandsOverToAnotherProcessIn10Microseconds) {
  const Times busy = Measure(2000, false, {});
  Print("one after another", busy);
  const Times idle = Measure(1000, false, std::chrono::microseconds(500));
  Print("every 0.5 ms", idle);
  if (HasFailure()) return;
  EXPECT_LT(At(busy.hand_off_us, 0.5), 10);
  EXPECT_LT(At(idle.hand_off_us, 0.5), 10);
}

TEST_F(HandOffTest, BesideAKernelOfTheTrainers) { Print("beside kernels of the trainer", Measure(500, true, {})); }

}  // namespace
}  // namespace shardd::cuda
