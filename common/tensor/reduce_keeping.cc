#include <algorithm>
#include <vector>

#include "common/tensor/isa_internal.h"
#include "common/tensor/kernels.h"

namespace shardd {
namespace {

using tensor::BFloat16;
using tensor::Float16;

template <typename To, bool kAccumulate>
struct KeepBody {
  static SHARDD_ALWAYS_INLINE float Round(float x) { return To::Load(To::Store(x)); }
  static SHARDD_ALWAYS_INLINE void Run(const float* sum, float* dst, int64_t numel) {
    const float* __restrict in = sum;
    float* __restrict out = dst;
    for (int64_t i = 0; i < numel; ++i) {
      const float rounded = Round(in[i]);
      out[i] = kAccumulate ? Round(out[i] + rounded) : rounded;
    }
  }
};

using KeepFn = void (*)(const float*, float*, int64_t);

template <typename To>
KeepFn SelectKeep(bool accumulate) {
  const tensor::Isa isa = tensor::CurrentIsa();
  return accumulate ? tensor::Select<KeepBody<To, true>, const float*, float*, int64_t>(isa)
                    : tensor::Select<KeepBody<To, false>, const float*, float*, int64_t>(isa);
}

}  // namespace

void ReduceSourcesKeeping(absl::Span<const void* const> sources, DType source_dtype, DType round_to, DType keep,
                          float scale, bool accumulate, float* dst, int64_t numel) {
  if (keep != v1::DTYPE_BFLOAT16 && keep != v1::DTYPE_FLOAT16) tensor::UnsupportedDType("keep sums in", keep);
  const KeepFn put = keep == v1::DTYPE_BFLOAT16 ? SelectKeep<BFloat16>(accumulate) : SelectKeep<Float16>(accumulate);
  const int64_t bytes = DTypeSizeBytes(source_dtype);
  alignas(64) float sum[tensor::kBlockNumel];
  std::vector<const void*> at(sources.size());
  for (int64_t first = 0; first < numel; first += tensor::kBlockNumel) {
    const int64_t count = std::min(tensor::kBlockNumel, numel - first);
    for (size_t k = 0; k < sources.size(); ++k) at[k] = static_cast<const char*>(sources[k]) + first * bytes;
    ReduceSources(at, source_dtype, round_to, scale, /*accumulate=*/false, sum, count);
    put(sum, dst + first, count);
  }
}

}  // namespace shardd
