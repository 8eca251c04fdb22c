#include "server/device/cuda/kernels/norm.cuh"

namespace shardd::cuda {
namespace {

constexpr unsigned kAll = 0xffffffffu;

// Valid in lane 0.
__device__ __forceinline__ double AddLanes(double mine) {
  for (int width = kLanes / 2; width > 0; width /= 2) mine += __shfl_down_sync(kAll, mine, width);
  return mine;
}
// Valid in every lane.
__device__ __forceinline__ float LargestOfLanes(float mine) {
  for (int width = kLanes / 2; width > 0; width /= 2) mine = Larger(mine, __shfl_xor_sync(kAll, mine, width));
  return mine;
}

// The sum of one block of elements; valid in lane 0.
__device__ __forceinline__ NormState PartOf(double order, const float* src, int count, int lane) {
  if (order == 2) return {1, AddLanes(LaneSum<2>(src, count, lane))};
  if (order == 1) return {1, AddLanes(LaneSum<1>(src, count, lane))};
  if (order == 3) return {1, AddLanes(LaneSum<3>(src, count, lane))};
  if (order == 4) return {1, AddLanes(LaneSum<4>(src, count, lane))};
  const double largest = static_cast<double>(LargestOfLanes(LaneLargest(src, count, lane)));
  if (IsInfinite(order) || !IsFiniteDouble(largest) || largest == 0) return {largest, 1};
  return {largest, AddLanes(LaneScaledSum(src, count, lane, largest, order))};
}

}  // namespace
}  // namespace shardd::cuda

extern "C" __global__ void __launch_bounds__(shardd::cuda::kBlockThreads)
    shardd_norm(const __grid_constant__ shardd::cuda::NormArgs args) {
  using namespace shardd::cuda;
  const int lane = static_cast<int>(threadIdx.x % kLanes);
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / kLanes);
  const int64_t blocks = NormBlocks(args.numel);
  for (int64_t block = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes; block < blocks;
       block += warps) {
    const int64_t first = block * kNormBlockNumel;
    const int64_t left = args.numel - first;
    const int count = static_cast<int>(left < kNormBlockNumel ? left : kNormBlockNumel);
    const shardd::NormState part = PartOf(args.order, args.src + first, count, lane);
    if (lane == 0) args.scratch[block] = part;
  }
}

// One block.
extern "C" __global__ void __launch_bounds__(shardd::cuda::kBlockThreads)
    shardd_norm_finish(const __grid_constant__ shardd::cuda::NormArgs args) {
  using namespace shardd::cuda;
  const int64_t blocks = NormBlocks(args.numel);
  const int64_t slices = NormSlices(args.numel);
  for (int64_t slice = threadIdx.x; slice < slices; slice += blockDim.x) {
    args.scratch[blocks + slice] = SliceOf(args, slice * kNormSliceBlocks, blocks);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  shardd::NormState result = *args.result;
  AddParts(args.order, args.scratch + blocks, slices, &result);
  *args.result = result;
}
