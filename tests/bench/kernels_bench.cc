// Bandwidth of the kernels, each beside a baseline of the same bytes in the same run: the two take turns, and `ratio`
// is the median over turns of baseline time / kernel time (1: as fast; more is faster). Reductions, casts and copies
// are held against glibc's memcpy that moves as many bytes (read + written) as the kernel; AdamW against a plain
// vectorised loop. One thread. `--benchmark_min_time` and the sizes (bytes of the largest operand) are in the names.

#include <benchmark/benchmark.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/synchronization/notification.h"
#include "common/tensor/float8_blocks.h"
#include "common/tensor/isa.h"
#include "common/tensor/update_log.h"
#include "server/device/cpu/cpu_ops.h"
#include "server/device/device.h"
#include "server/device/devices.h"
#include "server/multinode/value_digest.h"

// The baseline loops are what a careful programmer would write and a compiler vectorise, on the widest level.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-math-errno", "no-trapping-math")
#endif

namespace shardd {
namespace {

// In huge pages where it has some, as slabs are.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t numel, T value = T{}) : data_(Allocate(numel * static_cast<int64_t>(sizeof(T))), &std::free) {
    std::fill_n(data_.get(), numel, value);
  }
  T* data() { return data_.get(); }

 private:
  static T* Allocate(int64_t size_bytes) {
    const size_t page_bytes = size_bytes >= (2 << 20) ? 2 << 20 : 4096;
    const size_t whole_bytes = (static_cast<size_t>(size_bytes) + page_bytes - 1) / page_bytes * page_bytes;
    void* const data = std::aligned_alloc(page_bytes, whole_bytes);
    (void)madvise(data, whole_bytes, MADV_HUGEPAGE);
    return static_cast<T*>(data);
  }
  std::unique_ptr<T, void (*)(void*)> data_;
};

double CpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

template <typename F>
double Seconds(F&& f) {
  const double begin = CpuSeconds();
  f();
  benchmark::ClobberMemory();
  return CpuSeconds() - begin;
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// Runs `kernel` and `baseline` in turns; both move `bytes`.
template <typename Kernel, typename Baseline>
void Compare(benchmark::State& state, int64_t bytes, Kernel&& kernel, Baseline&& baseline) {
  kernel();
  baseline();
  std::vector<double> ratios, kernel_s, baseline_s;
  for (auto _ : state) {
    baseline_s.push_back(Seconds(baseline));
    kernel_s.push_back(Seconds(kernel));
    ratios.push_back(baseline_s.back() / kernel_s.back());
    state.SetIterationTime(kernel_s.back());
  }
  const double gb = static_cast<double>(bytes) / 1e9;
  state.counters["ratio"] = Median(ratios);
  state.counters["GB/s"] = gb / Median(kernel_s);
  state.counters["baseline_GB/s"] = gb / Median(baseline_s);
}

// memcpy that reads and writes `traffic_bytes` together.
class Memcpy {
 public:
  explicit Memcpy(int64_t traffic_bytes) : bytes_(traffic_bytes / 2), src_(bytes_, 1), dst_(bytes_, 2) {}
  void operator()() { std::memcpy(dst_.data(), src_.data(), static_cast<size_t>(bytes_)); }

 private:
  int64_t bytes_;
  Buffer<char> src_, dst_;
};

void Copy(benchmark::State& state) {
  const int64_t bytes = state.range(0);
  Buffer<char> src(bytes, 1), dst(bytes, 2);
  Compare(
      state, 2 * bytes, [&] { CopyBytes(src.data(), dst.data(), bytes); }, Memcpy(2 * bytes));
}

template <DType kFrom, DType kTo>
void CastBench(benchmark::State& state) {
  const int64_t numel = state.range(0) / 4;
  const int64_t traffic = numel * (DTypeSizeBytes(kFrom) + DTypeSizeBytes(kTo));
  Buffer<float> src(numel), dst(numel);  // zeros are numbers in every dtype
  Compare(
      state, traffic, [&] { Cast(src.data(), kFrom, dst.data(), kTo, numel); }, Memcpy(traffic));
}

// What gathers in float8 cost beside the plain cast that they replace: `baseline` is that cast, of as many elements.
// `state.range(0)`: bytes of the elements in fp32.
template <DType kFrom, DType kTo, typename Codec>
void CompareCodec(benchmark::State& state, Codec&& codec) {
  const int64_t numel = state.range(0) / 4;
  Buffer<float> values(numel, 0.37f), cast(numel);
  Buffer<char> blocks(Float8BlocksBytes(numel));
  Cast(values.data(), v1::DTYPE_FLOAT32, values.data(), kFrom, numel);
  EncodeFloat8Blocks(values.data(), kFrom, kTo, blocks.data(), numel);
  Compare(
      state, numel, [&] { codec(values.data(), blocks.data(), cast.data(), numel); },
      [&] { Cast(values.data(), kFrom, cast.data(), kTo, numel); });
  state.counters["elements/s"] = state.counters["GB/s"] * 1e9;
}

template <DType kFrom, DType kTo>
void Float8Encode(benchmark::State& state) {
  CompareCodec<kFrom, kTo>(state, [](const void* values, void* blocks, void*, int64_t numel) {
    EncodeFloat8Blocks(values, kFrom, kTo, blocks, numel);
  });
}

template <DType kTo>
void Float8Decode(benchmark::State& state) {
  CompareCodec<v1::DTYPE_FLOAT32, kTo>(
      state, [](const void*, void* blocks, void* to, int64_t numel) { DecodeFloat8Blocks(blocks, to, kTo, numel); });
}

template <DType kFrom, DType kTo>
void Float8Round(benchmark::State& state) {
  CompareCodec<kFrom, kTo>(state, [](const void* values, void*, void* to, int64_t numel) {
    RoundToFloat8Blocks(values, kFrom, to, kTo, numel);
  });
}

void Reduce(benchmark::State& state, int count, DType dtype, DType reduce_dtype, bool accumulate) {
  const int64_t numel = state.range(0) / 4;
  std::vector<Buffer<float>> buffers;
  std::vector<const void*> sources;
  for (int k = 0; k < count; ++k) {
    buffers.emplace_back(numel);
    sources.push_back(buffers.back().data());
  }
  Buffer<float> dst(numel);
  const int64_t traffic = numel * (count * DTypeSizeBytes(dtype) + 4 + (accumulate ? 4 : 0));
  Compare(
      state, traffic,
      [&] { ReduceSources(sources, dtype, reduce_dtype, v1::DTYPE_FLOAT32, 0.25f, accumulate, dst.data(), numel); },
      Memcpy(traffic));
}

struct AdamWBuffers {
  explicit AdamWBuffers(int64_t numel) : p(numel, 1), g(numel, 0.5f), m(numel, 0.1f), v(numel, 0.2f), cast(numel) {}
  Buffer<float> p, g, m, v;
  Buffer<uint16_t> cast;
};
constexpr AdamWParams kParams = {1e-6, 0.9, 0.999, 1e-8, 0.01, 10, 1};

struct PlainArgs {
  float *p, *g, *m, *v;
  uint16_t* cast;
  int64_t numel;
  float decay, step_size, inverse_sqrt;
};

// PyTorch's formula with its scalars folded, as one loop.
template <bool kCast>
inline __attribute__((always_inline)) void PlainAdamW(const PlainArgs& a) {
  float* __restrict p = a.p;
  const float* __restrict g = a.g;
  float* __restrict m = a.m;
  float* __restrict v = a.v;
  uint16_t* __restrict cast = a.cast;
  const float decay = a.decay, step_size = a.step_size, inverse_sqrt = a.inverse_sqrt;
  for (int64_t i = 0; i < a.numel; ++i) {
    const float mi = m[i] + 0.1f * (g[i] - m[i]);
    const float vi = 0.999f * v[i] + 0.001f * g[i] * g[i];
    const float pi = p[i] * decay - step_size * mi / (__builtin_sqrtf(vi) * inverse_sqrt + 1e-8f);
    m[i] = mi;
    v[i] = vi;
    p[i] = pi;
    if constexpr (kCast) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, pi);
      cast[i] = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
  }
}
template <bool kCast>
void PlainBase(const PlainArgs& a) {
  PlainAdamW<kCast>(a);
}
#if defined(__x86_64__)
template <bool kCast>
__attribute__((target("arch=x86-64-v3"))) void PlainAvx2(const PlainArgs& a) {
  PlainAdamW<kCast>(a);
}
template <bool kCast>
__attribute__((target("arch=x86-64-v4"))) void PlainAvx512(const PlainArgs& a) {
  PlainAdamW<kCast>(a);
}
#endif

template <bool kCast>
void RunPlain(AdamWBuffers& b, int64_t numel) {
  const double correction1 = 1 - std::pow(kParams.beta1, kParams.step);
  const double correction2 = 1 - std::pow(kParams.beta2, kParams.step);
  const PlainArgs args = {b.p.data(),
                          b.g.data(),
                          b.m.data(),
                          b.v.data(),
                          b.cast.data(),
                          numel,
                          static_cast<float>(1 - kParams.lr * kParams.weight_decay),
                          static_cast<float>(kParams.lr / correction1),
                          static_cast<float>(1 / std::sqrt(correction2))};
#if defined(__x86_64__)
  if (tensor::BestIsa() == tensor::Isa::kAvx512) return PlainAvx512<kCast>(args);
  if (tensor::BestIsa() == tensor::Isa::kAvx2) return PlainAvx2<kCast>(args);
#endif
  PlainBase<kCast>(args);
}

template <bool kCast>
void AdamW(benchmark::State& state) {
  const int64_t numel = state.range(0) / 4;
  AdamWBuffers a(numel), b(numel);
  const auto kernel = [&] {
    AdamWUpdate(kParams, a.p.data(), v1::DTYPE_FLOAT32, a.g.data(), a.m.data(), a.v.data(),
                kCast ? a.cast.data() : nullptr, v1::DTYPE_BFLOAT16, numel);
  };
  Compare(state, numel * (kCast ? 30 : 28), kernel, [&] { RunPlain<kCast>(b, numel); });
}

// The same through a device: its thread, its slices, its callback.
void AdamWOnDevice(benchmark::State& state) {
  const int64_t numel = state.range(0) / 4;
  AdamWBuffers a(numel), b(numel);
  const auto devices = std::move(MakeDevices("cpu:1")->devices);
  const auto on_device = [&] {
    absl::Notification done;
    devices[0]->Submit(StreamId::kOptimizer, {"adamw",
                                              {AdamWOp{kParams, a.p.data(), v1::DTYPE_FLOAT32, a.g.data(), a.m.data(),
                                                       a.v.data(), nullptr, v1::DTYPE_FLOAT32, numel}},
                                              [&](absl::Status) { done.Notify(); }});
    done.WaitForNotification();
  };
  Compare(state, numel * 28, on_device, [&] { RunPlain<false>(b, numel); });
}

// As a device runs it, with the log out of which another process could complete it; the baseline is the same without.
void AdamWLogged(benchmark::State& state) {
  const int64_t numel = state.range(0) / 4;
  AdamWBuffers a(numel), b(numel);
  const auto log = std::make_unique<UpdateLog>();
  const auto run = [numel](AdamWBuffers& of, UpdateLog* logged) {
    const DeviceOp op = AdamWOp{kParams,     of.p.data(), v1::DTYPE_FLOAT32, of.g.data(), of.m.data(),
                                of.v.data(), nullptr,     v1::DTYPE_FLOAT32, numel,       {logged, 0}};
    if (logged != nullptr) logged->Begin(1);
    const int64_t slice = CpuOpSlice(op);
    for (int64_t first = 0; first < numel; first += slice) RunCpuOp(op, first, std::min(slice, numel - first));
  };
  Compare(
      state, numel * 28, [&] { run(a, log.get()); }, [&] { run(b, nullptr); });
}

void SquaredNormBench(benchmark::State& state) {
  const int64_t numel = state.range(0) / 4;
  Buffer<float> src(numel, 0.5f);
  double sink = 0;
  Compare(
      state, numel * 4, [&] { benchmark::DoNotOptimize(sink += SquaredNorm(src.data(), numel)); }, Memcpy(numel * 4));
}

// What replicas compare after every `compareEvery` steps (server/multinode/value_digest.h).
void Digest(benchmark::State& state) {
  const int64_t numel = state.range(0) / 4;
  Buffer<float> src(numel, 0.5f);
  const auto digest = [&] {
    ValueDigest of;
    of.Add(src.data(), static_cast<size_t>(numel) * 4);
    benchmark::DoNotOptimize(of.value());
  };
  Compare(state, numel * 4, digest, Memcpy(numel * 4));
}

constexpr DType kF32 = v1::DTYPE_FLOAT32, kBf16 = v1::DTYPE_BFLOAT16, kF16 = v1::DTYPE_FLOAT16;
constexpr DType kNone = v1::DTYPE_UNSPECIFIED;
constexpr int64_t kLarge = int64_t{64} << 20;

BENCHMARK(Copy)->RangeMultiplier(2)->Range(256 << 10, kLarge)->UseManualTime();
BENCHMARK_TEMPLATE(CastBench, kF32, kBf16)->Arg(256 << 10)->Arg(4 << 20)->Arg(kLarge)->UseManualTime();
BENCHMARK_TEMPLATE(CastBench, kBf16, kF32)->Arg(256 << 10)->Arg(4 << 20)->Arg(kLarge)->UseManualTime();
BENCHMARK_TEMPLATE(CastBench, kF32, kF16)->Arg(kLarge)->UseManualTime();
BENCHMARK_TEMPLATE(CastBench, kF16, kF32)->Arg(kLarge)->UseManualTime();
BENCHMARK_TEMPLATE(Float8Encode, kF32, kF32)->Arg(256 << 10)->Arg(kLarge)->UseManualTime();
BENCHMARK_TEMPLATE(Float8Encode, kF32, kBf16)->Arg(256 << 10)->Arg(kLarge)->UseManualTime();
BENCHMARK_TEMPLATE(Float8Decode, kBf16)->Arg(256 << 10)->Arg(kLarge)->UseManualTime();
BENCHMARK_TEMPLATE(Float8Decode, kF32)->Arg(kLarge)->UseManualTime();
BENCHMARK_TEMPLATE(Float8Round, kF32, kBf16)->Arg(256 << 10)->Arg(kLarge)->UseManualTime();
BENCHMARK_CAPTURE(Reduce, 2xf32, 2, kF32, kNone, false)->Arg(256 << 10)->Arg(4 << 20)->Arg(kLarge)->UseManualTime();
BENCHMARK_CAPTURE(Reduce, 4xf32, 4, kF32, kNone, false)->Arg(256 << 10)->Arg(4 << 20)->Arg(kLarge)->UseManualTime();
BENCHMARK_CAPTURE(Reduce, 2xf32_accumulate, 2, kF32, kNone, true)->Arg(kLarge)->UseManualTime();
BENCHMARK_CAPTURE(Reduce, 2xbf16, 2, kBf16, kNone, false)->Arg(kLarge)->UseManualTime();
BENCHMARK_CAPTURE(Reduce, 4xbf16, 4, kBf16, kNone, false)->Arg(kLarge)->UseManualTime();
BENCHMARK_CAPTURE(Reduce, 2xf32_to_bf16, 2, kF32, kBf16, false)->Arg(kLarge)->UseManualTime();
BENCHMARK_CAPTURE(Reduce, 2xf16, 2, kF16, kNone, false)->Arg(kLarge)->UseManualTime();
BENCHMARK_CAPTURE(Reduce, 8xf32, 8, kF32, kNone, false)->Arg(kLarge)->UseManualTime();
BENCHMARK(SquaredNormBench)->Arg(kLarge)->UseManualTime();
BENCHMARK(Digest)->Arg(kLarge)->UseManualTime();
BENCHMARK_TEMPLATE(AdamW, false)->Arg(256 << 10)->Arg(kLarge)->UseManualTime();
BENCHMARK_TEMPLATE(AdamW, true)->Arg(kLarge)->UseManualTime();
BENCHMARK(AdamWLogged)->Arg(4 << 20)->Arg(kLarge)->UseManualTime();
BENCHMARK(AdamWOnDevice)->Arg(4 << 20)->Arg(kLarge)->UseManualTime();

}  // namespace
}  // namespace shardd

BENCHMARK_MAIN();
