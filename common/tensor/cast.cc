#include <cstring>

#include "common/tensor/isa_internal.h"
#include "common/tensor/kernels.h"

namespace shardd {
namespace {

using tensor::Select;

template <typename From, typename To>
struct CastBody {
  static SHARDD_ALWAYS_INLINE void Run(const void* src, void* dst, int64_t numel) {
    const auto* __restrict in = static_cast<const typename From::Storage*>(src);
    auto* __restrict out = static_cast<typename To::Storage*>(dst);
    for (int64_t i = 0; i < numel; ++i) out[i] = To::Store(From::Load(in[i]));
  }
};

using CastFn = void (*)(const void*, void*, int64_t);

template <typename From>
CastFn SelectTo(DType to) {
  const tensor::Isa isa = tensor::CurrentIsa();
  switch (to) {
    case v1::DTYPE_FLOAT32:
      return Select<CastBody<From, tensor::Float32>, const void*, void*, int64_t>(isa);
    case v1::DTYPE_BFLOAT16:
      return Select<CastBody<From, tensor::BFloat16>, const void*, void*, int64_t>(isa);
    case v1::DTYPE_FLOAT16:
      return Select<CastBody<From, tensor::Float16>, const void*, void*, int64_t>(isa);
    case v1::DTYPE_FLOAT64:
      return Select<CastBody<From, tensor::Float64>, const void*, void*, int64_t>(isa);
    default:
      tensor::UnsupportedDType("cast to", to);
  }
}

CastFn SelectCast(DType from, DType to) {
  switch (from) {
    case v1::DTYPE_FLOAT32:
      return SelectTo<tensor::Float32>(to);
    case v1::DTYPE_BFLOAT16:
      return SelectTo<tensor::BFloat16>(to);
    case v1::DTYPE_FLOAT16:
      return SelectTo<tensor::Float16>(to);
    case v1::DTYPE_FLOAT64:
      return SelectTo<tensor::Float64>(to);
    default:
      tensor::UnsupportedDType("cast from", from);
  }
}

}  // namespace

void Cast(const void* src, DType from, void* dst, DType to, int64_t numel) {
  if (numel <= 0) return;
  const int64_t from_bytes = DTypeSizeBytes(from);
  const int64_t to_bytes = DTypeSizeBytes(to);
  if (from == to) {
    if (from_bytes == 0) tensor::UnsupportedDType("cast from", from);
    CopyBytes(src, dst, numel * from_bytes);
    return;
  }
  const CastFn cast = SelectCast(from, to);
  const bool stream = numel * to_bytes >= tensor::kStreamBytes;
  const char* in = static_cast<const char*>(src);
  tensor::ForBlocks(dst, numel, to_bytes, stream,
                    [=](int64_t first, int64_t count, void* out) { cast(in + first * from_bytes, out, count); });
}

void CopyBytes(const void* src, void* dst, int64_t size_bytes) {
  if (size_bytes <= 0) return;
  const char* in = static_cast<const char*>(src);
  char* out = static_cast<char*>(dst);
  if (size_bytes < tensor::kStreamBytes) {
    std::memcpy(out, in, static_cast<size_t>(size_bytes));
    return;
  }
  const int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(out) & 63);
  const int64_t body = (size_bytes - head) & ~int64_t{63};
  std::memcpy(out, in, static_cast<size_t>(head));
  tensor::StreamCopy(in + head, out + head, body);
  std::memcpy(out + head + body, in + head + body, static_cast<size_t>(size_bytes - head - body));
  tensor::StreamFence();
}

}  // namespace shardd
