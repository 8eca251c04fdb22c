// The addition of ranks' gradients on CPUs, in the order of ranks (numerics: kernels.h; on GPUs:
// server/device/cuda/kernels/reduce.cuh).

#include <array>

#include "common/tensor/isa_internal.h"
#include "common/tensor/kernels.h"

namespace shardd {
namespace {

using tensor::Select;

struct NoRound {
  template <typename T>
  static SHARDD_ALWAYS_INLINE T Round(T x) {
    return x;
  }
};
template <typename To>
struct RoundTo {
  template <typename T>
  static SHARDD_ALWAYS_INLINE float Round(T x) {
    return To::Load(To::Store(x));
  }
};

inline constexpr int kMaxFused = 4;

enum class Into {
  kOverwrite,   // dst = scale * (s0 + s1 + ...)
  kAccumulate,  // dst = dst + scale * (s0 + s1 + ...)
  kContinue,    // dst = ((dst + s0) + s1) + ...: a sum that earlier sources began; no scale
};

// Adds kSources sources, left to right; Rounding before each addition.
template <typename From, typename Rounding, int kSources, Into kInto>
struct ReduceBody {
  static SHARDD_ALWAYS_INLINE auto At(const typename From::Storage* s, int64_t i) {
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
      auto sum = kInto == Into::kContinue ? out[i] + At(s0, i) : At(s0, i);  // for fp64 in fp64
      if constexpr (kSources > 1) sum += At(s1, i);
      if constexpr (kSources > 2) sum += At(s2, i);
      if constexpr (kSources > 3) sum += At(s3, i);
      if constexpr (kInto != Into::kContinue) sum *= scale;
      if constexpr (kInto == Into::kAccumulate) sum = out[i] + sum;
      out[i] = static_cast<float>(sum);
    }
  }
};

using ReduceFn = void (*)(const void* const*, float, float*, int64_t);

template <typename From, typename Rounding, int kSources>
ReduceFn SelectInto(Into into) {
  const tensor::Isa isa = tensor::CurrentIsa();
  switch (into) {
    case Into::kOverwrite:
      return Select<ReduceBody<From, Rounding, kSources, Into::kOverwrite>, const void* const*, float, float*, int64_t>(
          isa);
    case Into::kAccumulate:
      return Select<ReduceBody<From, Rounding, kSources, Into::kAccumulate>, const void* const*, float, float*,
                    int64_t>(isa);
    default:
      return Select<ReduceBody<From, Rounding, kSources, Into::kContinue>, const void* const*, float, float*, int64_t>(
          isa);
  }
}

template <typename From, typename Rounding>
ReduceFn SelectCount(int count, Into into) {
  switch (count) {
    case 1:
      return SelectInto<From, Rounding, 1>(into);
    case 2:
      return SelectInto<From, Rounding, 2>(into);
    case 3:
      return SelectInto<From, Rounding, 3>(into);
    default:
      return SelectInto<From, Rounding, 4>(into);
  }
}

ReduceFn SelectReduce(DType source, DType reduce_dtype, int count, Into into) {
  // Rounding to a dtype that the source already fits changes nothing.
  const bool none = reduce_dtype == source || reduce_dtype == v1::DTYPE_FLOAT32;
  using tensor::BFloat16;
  using tensor::Float16;
  using tensor::Float32;
  switch (source) {
    case v1::DTYPE_FLOAT32:
      if (none) return SelectCount<Float32, NoRound>(count, into);
      if (reduce_dtype == v1::DTYPE_BFLOAT16) return SelectCount<Float32, RoundTo<BFloat16>>(count, into);
      return SelectCount<Float32, RoundTo<Float16>>(count, into);
    case v1::DTYPE_BFLOAT16:
      if (none) return SelectCount<BFloat16, NoRound>(count, into);
      return SelectCount<BFloat16, RoundTo<Float16>>(count, into);
    case v1::DTYPE_FLOAT16:
      if (none) return SelectCount<Float16, NoRound>(count, into);
      return SelectCount<Float16, RoundTo<BFloat16>>(count, into);
    case v1::DTYPE_FLOAT64:
      if (none) return SelectCount<tensor::Float64, NoRound>(count, into);
      if (reduce_dtype == v1::DTYPE_BFLOAT16) return SelectCount<tensor::Float64, RoundTo<BFloat16>>(count, into);
      return SelectCount<tensor::Float64, RoundTo<Float16>>(count, into);
    default:
      tensor::UnsupportedDType("reduce from", source);
  }
}

// What to do with a sum.
template <typename Reduce, typename Keep, bool kAccumulate>
struct FinishBody {
  static SHARDD_ALWAYS_INLINE void Run(const float* sums, float scale, float* dst, int64_t numel) {
    const float* __restrict sum = sums;
    float* __restrict out = dst;
    for (int64_t i = 0; i < numel; ++i) {
      const float result = Keep::Round(Reduce::Round(sum[i] * scale));
      out[i] = kAccumulate ? Keep::Round(out[i] + result) : result;
    }
  }
};

using FinishFn = void (*)(const float*, float, float*, int64_t);

template <typename Reduce, typename Keep>
FinishFn SelectFinishOf(bool accumulate) {
  const tensor::Isa isa = tensor::CurrentIsa();
  return accumulate ? Select<FinishBody<Reduce, Keep, true>, const float*, float, float*, int64_t>(isa)
                    : Select<FinishBody<Reduce, Keep, false>, const float*, float, float*, int64_t>(isa);
}

template <typename Reduce>
FinishFn SelectKeep(DType keep, bool accumulate) {
  if (keep == v1::DTYPE_BFLOAT16) return SelectFinishOf<Reduce, RoundTo<tensor::BFloat16>>(accumulate);
  if (keep == v1::DTYPE_FLOAT16) return SelectFinishOf<Reduce, RoundTo<tensor::Float16>>(accumulate);
  return SelectFinishOf<Reduce, NoRound>(accumulate);
}

FinishFn SelectFinish(DType reduce_dtype, DType keep, bool accumulate) {
  if (reduce_dtype == v1::DTYPE_BFLOAT16) return SelectKeep<RoundTo<tensor::BFloat16>>(keep, accumulate);
  if (reduce_dtype == v1::DTYPE_FLOAT16) return SelectKeep<RoundTo<tensor::Float16>>(keep, accumulate);
  return SelectKeep<NoRound>(keep, accumulate);
}

// Up to four sources at once, with sums in fp32.
void ReduceFew(const void* const* sources, int count, DType source_dtype, float scale, bool accumulate, float* dst,
               int64_t numel) {
  const ReduceFn reduce =
      SelectReduce(source_dtype, v1::DTYPE_FLOAT32, count, accumulate ? Into::kAccumulate : Into::kOverwrite);
  const int64_t bytes = DTypeSizeBytes(source_dtype);
  // An accumulated destination is in the cache, because it was read.
  const bool stream = !accumulate && numel * int64_t{sizeof(float)} >= tensor::kStreamBytes;
  tensor::ForBlocks(dst, numel, sizeof(float), stream, [=](int64_t first, int64_t n, void* out) {
    const void* at[kMaxFused] = {};
    for (int k = 0; k < count; ++k) at[k] = static_cast<const char*>(sources[k]) + first * bytes;
    reduce(at, scale, static_cast<float*>(out), n);
  });
}

// More sources, or with rounding: block by block, the sum grows in L1 by up to four sources at a time, in their order.
void ReduceByBlocks(absl::Span<const void* const> sources, DType source_dtype, DType reduce_dtype, DType keep,
                    float scale, bool accumulate, float* dst, int64_t numel) {
  const size_t total = sources.size();
  ReduceFn continue_with[kMaxFused + 1] = {};
  for (int k = 1; k <= kMaxFused; ++k) continue_with[k] = SelectReduce(source_dtype, reduce_dtype, k, Into::kContinue);
  const ReduceFn begin = SelectReduce(source_dtype, reduce_dtype,
                                      total < kMaxFused ? static_cast<int>(total) : kMaxFused, Into::kOverwrite);
  const FinishFn finish = SelectFinish(reduce_dtype, keep, accumulate);
  const int64_t bytes = DTypeSizeBytes(source_dtype);
  const bool stream = !accumulate && numel * int64_t{sizeof(float)} >= tensor::kStreamBytes;
  tensor::ForBlocks(dst, numel, sizeof(float), stream, [&](int64_t first, int64_t count, void* out) {
    alignas(64) float sum[tensor::kBlockNumel];
    for (int64_t done = 0; done < count; done += tensor::kBlockNumel) {
      const int64_t n = count - done < tensor::kBlockNumel ? count - done : tensor::kBlockNumel;
      for (size_t k = 0; k < total; k += kMaxFused) {
        const void* at[kMaxFused] = {};
        const size_t some = total - k < kMaxFused ? total - k : kMaxFused;
        for (size_t j = 0; j < some; ++j) at[j] = static_cast<const char*>(sources[k + j]) + (first + done) * bytes;
        (k == 0 ? begin : continue_with[some])(at, 1.0f, sum, n);
      }
      finish(sum, scale, static_cast<float*>(out) + done, n);
    }
  });
}

}  // namespace

void ReduceSources(absl::Span<const void* const> sources, DType source_dtype, DType reduce_dtype, DType keep,
                   float scale, bool accumulate, float* dst, int64_t numel) {
  if (numel <= 0 || sources.empty()) return;
  if (reduce_dtype == v1::DTYPE_UNSPECIFIED) {
    reduce_dtype = source_dtype == v1::DTYPE_FLOAT64 ? v1::DTYPE_FLOAT32 : source_dtype;
  }
  if (keep == v1::DTYPE_UNSPECIFIED) keep = v1::DTYPE_FLOAT32;
  if (!IsTrainable(reduce_dtype)) tensor::UnsupportedDType("reduce in", reduce_dtype);
  if (!IsTrainable(keep)) tensor::UnsupportedDType("keep sums in", keep);
  const bool rounded = reduce_dtype != v1::DTYPE_FLOAT32 || keep != v1::DTYPE_FLOAT32;
  if (rounded || sources.size() > kMaxFused) {
    ReduceByBlocks(sources, source_dtype, reduce_dtype, keep, scale, accumulate, dst, numel);
  } else {
    ReduceFew(sources.data(), static_cast<int>(sources.size()), source_dtype, scale, accumulate, dst, numel);
  }
}

}  // namespace shardd
