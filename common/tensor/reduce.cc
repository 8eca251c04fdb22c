#include <array>

#include "common/tensor/isa_internal.h"
#include "common/tensor/kernels.h"

namespace shardd {
namespace {

using tensor::Select;

// No rounding before the sum.
struct NoRound {
  static SHARDD_ALWAYS_INLINE float Round(float x) { return x; }
};
template <typename To>
struct RoundTo {
  static SHARDD_ALWAYS_INLINE float Round(float x) { return To::Load(To::Store(x)); }
};

inline constexpr int kMaxFused = 4;

// dst = [dst +] scale * (s0 + s1 + ... ), kSources of them, left to right.
template <typename From, typename Rounding, int kSources, bool kAccumulate>
struct ReduceBody {
  static SHARDD_ALWAYS_INLINE float At(const typename From::Storage* s, int64_t i) {
    return Rounding::Round(From::Load(s[i]));
  }
  static SHARDD_ALWAYS_INLINE void Run(const void* const* sources, float scale, float* dst, int64_t numel) {
    using Storage = typename From::Storage;
    const Storage* __restrict s0 = static_cast<const Storage*>(sources[0]);
    const Storage* __restrict s1 = static_cast<const Storage*>(sources[kSources > 1 ? 1 : 0]);
    const Storage* __restrict s2 = static_cast<const Storage*>(sources[kSources > 2 ? 2 : 0]);
    const Storage* __restrict s3 = static_cast<const Storage*>(sources[kSources > 3 ? 3 : 0]);
    float* __restrict out = dst;
    for (int64_t i = 0; i < numel; ++i) {
      float sum = At(s0, i);
      if constexpr (kSources > 1) sum += At(s1, i);
      if constexpr (kSources > 2) sum += At(s2, i);
      if constexpr (kSources > 3) sum += At(s3, i);
      sum *= scale;
      if constexpr (kAccumulate) sum = out[i] + sum;
      out[i] = sum;
    }
  }
};

using ReduceFn = void (*)(const void* const*, float, float*, int64_t);

template <typename From, typename Rounding, int kSources>
ReduceFn SelectAccumulate(bool accumulate) {
  const tensor::Isa isa = tensor::CurrentIsa();
  return accumulate
             ? Select<ReduceBody<From, Rounding, kSources, true>, const void* const*, float, float*, int64_t>(isa)
             : Select<ReduceBody<From, Rounding, kSources, false>, const void* const*, float, float*, int64_t>(isa);
}

template <typename From, typename Rounding>
ReduceFn SelectCount(int count, bool accumulate) {
  switch (count) {
    case 1:
      return SelectAccumulate<From, Rounding, 1>(accumulate);
    case 2:
      return SelectAccumulate<From, Rounding, 2>(accumulate);
    case 3:
      return SelectAccumulate<From, Rounding, 3>(accumulate);
    default:
      return SelectAccumulate<From, Rounding, 4>(accumulate);
  }
}

ReduceFn SelectReduce(DType source, DType round_to, int count, bool accumulate) {
  // Rounding to what the source can hold anyway changes nothing.
  if (round_to == source || round_to == v1::DTYPE_FLOAT32) round_to = v1::DTYPE_UNSPECIFIED;
  const bool none = round_to == v1::DTYPE_UNSPECIFIED;
  if (!none && !IsTrainable(round_to)) tensor::UnsupportedDType("reduce rounding to", round_to);
  using tensor::BFloat16;
  using tensor::Float16;
  using tensor::Float32;
  switch (source) {
    case v1::DTYPE_FLOAT32:
      if (none) return SelectCount<Float32, NoRound>(count, accumulate);
      if (round_to == v1::DTYPE_BFLOAT16) return SelectCount<Float32, RoundTo<BFloat16>>(count, accumulate);
      return SelectCount<Float32, RoundTo<Float16>>(count, accumulate);
    case v1::DTYPE_BFLOAT16:
      if (none) return SelectCount<BFloat16, NoRound>(count, accumulate);
      return SelectCount<BFloat16, RoundTo<Float16>>(count, accumulate);
    case v1::DTYPE_FLOAT16:
      if (none) return SelectCount<Float16, NoRound>(count, accumulate);
      return SelectCount<Float16, RoundTo<BFloat16>>(count, accumulate);
    default:
      tensor::UnsupportedDType("reduce from", source);
  }
}

// Up to four sources in one go.
void ReduceFew(const void* const* sources, int count, DType source_dtype, DType round_to, float scale, bool accumulate,
               float* dst, int64_t numel) {
  const ReduceFn reduce = SelectReduce(source_dtype, round_to, count, accumulate);
  const int64_t bytes = DTypeSizeBytes(source_dtype);
  // An accumulated destination is in the cache already, because it was read.
  const bool stream = !accumulate && numel * int64_t{sizeof(float)} >= tensor::kStreamBytes;
  tensor::ForBlocks(dst, numel, sizeof(float), stream, [=](int64_t first, int64_t n, void* out) {
    const void* at[kMaxFused] = {};
    for (int k = 0; k < count; ++k) at[k] = static_cast<const char*>(sources[k]) + first * bytes;
    reduce(at, scale, static_cast<float*>(out), n);
  });
}

// More: block by block, the sum of the first four in L1, the others added to it one at a time to keep the order.
void ReduceMany(absl::Span<const void* const> sources, DType source_dtype, DType round_to, float scale, bool accumulate,
                float* dst, int64_t numel) {
  const ReduceFn first_four = SelectReduce(source_dtype, round_to, kMaxFused, false);
  const ReduceFn add_one = SelectReduce(source_dtype, round_to, 1, true);
  const ReduceFn finish = SelectReduce(v1::DTYPE_FLOAT32, v1::DTYPE_UNSPECIFIED, 1, accumulate);
  const int64_t bytes = DTypeSizeBytes(source_dtype);
  const bool stream = !accumulate && numel * int64_t{sizeof(float)} >= tensor::kStreamBytes;
  tensor::ForBlocks(dst, numel, sizeof(float), stream, [=](int64_t first, int64_t count, void* out) {
    alignas(64) float sum[tensor::kBlockNumel];
    for (int64_t done = 0; done < count; done += tensor::kBlockNumel) {
      const int64_t n = count - done < tensor::kBlockNumel ? count - done : tensor::kBlockNumel;
      const auto at = [&](size_t k) -> const void* {
        return static_cast<const char*>(sources[k]) + (first + done) * bytes;
      };
      const void* four[kMaxFused] = {at(0), at(1), at(2), at(3)};
      first_four(four, 1.0f, sum, n);
      for (size_t k = kMaxFused; k < sources.size(); ++k) {
        const void* one[1] = {at(k)};
        add_one(one, 1.0f, sum, n);
      }
      const void* result[1] = {sum};
      finish(result, scale, static_cast<float*>(out) + done, n);
    }
  });
}

}  // namespace

void ReduceSources(absl::Span<const void* const> sources, DType source_dtype, DType round_to, float scale,
                   bool accumulate, float* dst, int64_t numel) {
  if (numel <= 0 || sources.empty()) return;
  if (sources.size() <= kMaxFused) {
    ReduceFew(sources.data(), static_cast<int>(sources.size()), source_dtype, round_to, scale, accumulate, dst, numel);
  } else {
    ReduceMany(sources, source_dtype, round_to, scale, accumulate, dst, numel);
  }
}

}  // namespace shardd
