#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "common/tensor/kernels.h"
#include "tests/gpu/gpu.h"
#include "tests/gpu/gpu_fixture.h"

// What kernels move against what a copy on the device moves, both in this run: rounds of each alternate, the medians
// count. Bytes are those read and those written.
namespace shardd::cuda {
namespace {

constexpr int64_t kNumel = int64_t{1} << 28;  // 1 GiB of fp32: nothing of it stays in a cache
constexpr int kRounds = 7;
constexpr int kLaunches = 20;  // of a round

class BandwidthTest : public GpuTest {
 protected:
  char* Memory(int64_t size_bytes) {
    slabs_.push_back(gpu_->Allocate(size_bytes));
    char* at = static_cast<char*>(slabs_.back().data());
    // Zeros: updates of denormals and NaNs would take longer than those of a step.
    gpu_->Zero(at, size_bytes);
    return at;
  }
  float* Floats(int64_t numel) { return reinterpret_cast<float*>(Memory(numel * 4)); }

  double GigabytesPerSecond(int64_t moved_bytes, const std::function<void()>& launch) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kLaunches; ++i) launch();
    gpu_->Wait();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    return static_cast<double>(moved_bytes) * kLaunches / took.count() / 1e9;
  }
  // Prints and checks the share of the copy's bandwidth; gives the memory back.
  void Compare(const char* what, int64_t moved_bytes, const AnyArgs& args, double least = 0.85) {
    const int64_t copy_bytes = kNumel * 4;
    char* from = Memory(copy_bytes);
    char* to = Memory(copy_bytes);
    std::vector<double> copies, kernels;
    gpu_->Launch(args, 0);
    gpu_->Wait();
    for (int i = 0; i < kRounds; ++i) {
      copies.push_back(GigabytesPerSecond(2 * copy_bytes, [&] { gpu_->Copy(from, to, copy_bytes); }));
      kernels.push_back(GigabytesPerSecond(moved_bytes, [&] { gpu_->Launch(args, 0); }));
    }
    std::sort(copies.begin(), copies.end());
    std::sort(kernels.begin(), kernels.end());
    const double share = kernels[kRounds / 2] / copies[kRounds / 2];
    std::printf("| %s | %.0f | %.0f | %.3f (%.0f to %.0f) |\n", what, kernels[kRounds / 2], copies[kRounds / 2], share,
                kernels.front(), kernels.back());
    EXPECT_GE(share, least) << what;
    slabs_.clear();
  }

  std::vector<CudaSlab> slabs_;
};

TEST_F(BandwidthTest, CastsMoveWhatACopyMoves) {
  Compare("cast fp32 to bf16", kNumel * 6,
          CastArgs{Floats(kNumel), Memory(kNumel * 2), kNumel, kFloat32, kBFloat16, 1});
  Compare("cast bf16 to fp32", kNumel * 6,
          CastArgs{Memory(kNumel * 2), Floats(kNumel), kNumel, kBFloat16, kFloat32, 1});
  Compare("cast fp32 to fp16", kNumel * 6, CastArgs{Floats(kNumel), Memory(kNumel * 2), kNumel, kFloat32, kFloat16, 1});
}

TEST_F(BandwidthTest, CastOfAMisalignedSourceMovesWhatACopyMoves) {
  Compare("cast fp32 to bf16, source 4 bytes off", kNumel * 6,
          CastArgs{Floats(kNumel + 1) + 1, Memory(kNumel * 2), kNumel, kFloat32, kBFloat16, 1});
}

TEST_F(BandwidthTest, SumsMoveWhatACopyMoves) {
  for (const int sources : {2, 8}) {
    ReduceArgs args = {};
    for (int k = 0; k < sources; ++k) args.sources[k] = Memory(kNumel * 2);
    args.source_count = sources;
    args.source_dtype = kBFloat16;
    args.scale = 1.0f / static_cast<float>(sources);
    args.dst = Floats(kNumel);
    args.numel = kNumel;
    Compare(sources == 2 ? "sum of 2 in bf16" : "sum of 8 in bf16", kNumel * (2 * sources + 4), args, 0.8);
  }
}

TEST_F(BandwidthTest, AdamWMovesWhatACopyMoves) {
  const AdamWParams params = {1e-3, 0.9, 0.999, 1e-8, 1e-2, 3, 0.5, false};
  AdamWArgs args = {MakeAdamWScalars(params), kFloat32,           Floats(kNumel), Floats(kNumel), Floats(kNumel),
                    Floats(kNumel),           Memory(kNumel * 2), kBFloat16,      kNumel};
  Compare("AdamW, fp32 with a bf16 copy", kNumel * 30, args);
}

TEST_F(BandwidthTest, NormsReadAtLeastHalfOfWhatACopyMoves) {
  const NormArgs args = {Floats(kNumel), kNumel, 2, reinterpret_cast<NormState*>(Memory(NormScratchBytes(kNumel))),
                         reinterpret_cast<NormState*>(Memory(sizeof(NormState)))};
  Compare("norm of order 2", kNumel * 4, args, /*least=*/0.5);
}

}  // namespace
}  // namespace shardd::cuda
