#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#include "server/device/cuda/kernels/adamw.cuh"
#include "server/device/cuda/kernels/cast.cuh"
#include "server/device/cuda/kernels/finite.cuh"
#include "server/device/cuda/kernels/norm.cuh"
#include "server/device/cuda/kernels/reduce.cuh"
#include "server/device/cuda/kernels/rule.cuh"
#include "server/device/cuda/kernels/sgd.cuh"
#include "tests/server/device/kernel_runner.h"

namespace shardd::cuda {
namespace {

void RunThread(const CastArgs& args, Thread thread) { CastThread(args, thread); }
void RunThread(const ReduceArgs& args, Thread thread) { ReduceThread(args, thread); }
void RunThread(const FiniteArgs& args, Thread thread) { FiniteThread(args, thread); }
void RunThread(const AdamWArgs& args, Thread thread) { AdamWThread(args, thread); }
void RunThread(const SgdArgs& args, Thread thread) { SgdThread(args, thread); }
void RunThread(const RuleArgs& args, Thread thread) { RuleThread(args, thread); }

template <typename LaneFn>
double AddLanes(LaneFn lane) {
  double lanes[kLanes];
  for (int j = 0; j < kLanes; ++j) lanes[j] = lane(j);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

// What a warp does in norm.cu.
NormState PartOf(double order, const float* src, int count) {
  if (order == 1) return {1, AddLanes([=](int j) { return LaneSum<1>(src, count, j); })};
  if (order == 2) return {1, AddLanes([=](int j) { return LaneSum<2>(src, count, j); })};
  if (order == 3) return {1, AddLanes([=](int j) { return LaneSum<3>(src, count, j); })};
  if (order == 4) return {1, AddLanes([=](int j) { return LaneSum<4>(src, count, j); })};
  float largest = 0;
  for (int j = 0; j < kLanes; ++j) largest = Larger(largest, LaneLargest(src, count, j));
  if (IsInfinite(order) || !IsFiniteDouble(largest) || largest == 0) return {largest, 1};
  return {largest, AddLanes([=](int j) { return LaneScaledSum(src, count, j, largest, order); })};
}

void RunNorm(const NormArgs& args) {
  const int64_t blocks = NormBlocks(args.numel);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block * kNormBlockNumel;
    const int64_t left = args.numel - first;
    args.scratch[block] =
        PartOf(args.order, args.src + first, static_cast<int>(left < kNormBlockNumel ? left : kNormBlockNumel));
  }
  for (int64_t slice = 0; slice < NormSlices(args.numel); ++slice) {
    const NormState part = SliceOf(args, slice * kNormSliceBlocks, blocks);
    AddParts(args.order, &part, 1, args.result);
  }
}

// One thread after the other, on memory of the host.
class HostKernelRunner : public KernelRunner {
 public:
  char* Allocate(int64_t size_bytes) override {
    memory_.emplace_back(
        static_cast<char*>(std::aligned_alloc(256, static_cast<size_t>((size_bytes + 255) / 256 * 256))), &std::free);
    return memory_.back().get();
  }
  void Write(const void* host, void* to, int64_t size_bytes) override {
    std::memcpy(to, host, static_cast<size_t>(size_bytes));
  }
  void Read(const void* from, void* host, int64_t size_bytes) override {
    std::memcpy(host, from, static_cast<size_t>(size_bytes));
  }
  void Launch(const AnyArgs& any, uint32_t grid) override {
    std::visit(
        [grid](const auto& args) {
          if constexpr (std::is_same_v<std::decay_t<decltype(args)>, NormArgs>) {
            RunNorm(args);
          } else {
            const Geometry at = GeometryOf(args, /*multiprocessors=*/2);
            const int64_t threads = int64_t{grid == 0 ? at.grid : grid} * at.block;
            for (int64_t i = 0; i < threads; ++i) RunThread(args, {i, threads});
          }
        },
        any);
  }

 private:
  std::vector<std::unique_ptr<char, void (*)(void*)>> memory_;
};

}  // namespace

std::unique_ptr<KernelRunner> MakeKernelRunner(std::string*) { return std::make_unique<HostKernelRunner>(); }

}  // namespace shardd::cuda
