#ifndef SHARDD_SERVER_DEVICE_CUDA_KERNELS_PACK_CUH_
#define SHARDD_SERVER_DEVICE_CUDA_KERNELS_PACK_CUH_

// A thread's consecutive elements, moved by accesses of 16 bytes (or less, if they are fewer bytes).

#include <cstdint>
#include <cstring>

#include "server/device/cuda/kernels/element.cuh"

namespace shardd::cuda {

template <typename T, int kNumel>
struct Pack {
  T at[kNumel];
  static constexpr int kBytes = kNumel * static_cast<int>(sizeof(T));
  // Bytes of one access.
  static constexpr int kWidth = kBytes < 16 ? kBytes : 16;
};

SHARDD_ALWAYS_INLINE uint32_t Misaligned(const void* p, int width) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) & static_cast<uint32_t>(width - 1);
}

// kCount words of 32 bits; p aligned to kWidth bytes, 8 or 16.
template <int kWidth, int kCount>
SHARDD_ALWAYS_INLINE void LoadWords(const char* p, uint32_t* words) {
  static_assert(kWidth == 8 || kWidth == 16);
#if defined(__CUDA_ARCH__)
  SHARDD_UNROLL
  for (int i = 0; i < kCount; i += kWidth / 4) {
    if constexpr (kWidth == 16) {
      const uint4 four = *reinterpret_cast<const uint4*>(p + i * 4);
      words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
    } else {
      const uint2 two = *reinterpret_cast<const uint2*>(p + i * 4);
      words[i] = two.x, words[i + 1] = two.y;
    }
  }
#else
  std::memcpy(words, __builtin_assume_aligned(p, kWidth), kCount * 4);
#endif
}

template <int kWidth, int kCount>
SHARDD_ALWAYS_INLINE void StoreWords(char* p, const uint32_t* words) {
  static_assert(kWidth == 8 || kWidth == 16);
#if defined(__CUDA_ARCH__)
  SHARDD_UNROLL
  for (int i = 0; i < kCount; i += kWidth / 4) {
    if constexpr (kWidth == 16) {
      *reinterpret_cast<uint4*>(p + i * 4) = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
    } else {
      *reinterpret_cast<uint2*>(p + i * 4) = make_uint2(words[i], words[i + 1]);
    }
  }
#else
  std::memcpy(__builtin_assume_aligned(p, kWidth), words, kCount * 4);
#endif
}

// Words to elements and back, low half first. Spelled out: a memcpy here ends in local memory.
template <typename T, int kNumel>
SHARDD_ALWAYS_INLINE Pack<T, kNumel> FromWords(const uint32_t* words) {
  Pack<T, kNumel> out;
  SHARDD_UNROLL
  for (int i = 0; i < kNumel; ++i) {
    if constexpr (sizeof(T) == 2) out.at[i] = static_cast<T>(words[i / 2] >> (i % 2 * 16));
    if constexpr (sizeof(T) == 4) out.at[i] = __builtin_bit_cast(T, words[i]);
    if constexpr (sizeof(T) == 8) {
      out.at[i] = __builtin_bit_cast(T, static_cast<uint64_t>(words[i * 2 + 1]) << 32 | words[i * 2]);
    }
  }
  return out;
}
template <typename T, int kNumel>
SHARDD_ALWAYS_INLINE void ToWords(const Pack<T, kNumel>& pack, uint32_t* words) {
  SHARDD_UNROLL
  for (int i = 0; i < kNumel; ++i) {
    if constexpr (sizeof(T) == 2) {
      if (i % 2 == 0) words[i / 2] = static_cast<uint32_t>(pack.at[i]) | static_cast<uint32_t>(pack.at[i + 1]) << 16;
    }
    if constexpr (sizeof(T) == 4) words[i] = __builtin_bit_cast(uint32_t, pack.at[i]);
    if constexpr (sizeof(T) == 8) {
      const uint64_t bits = __builtin_bit_cast(uint64_t, pack.at[i]);
      words[i * 2] = static_cast<uint32_t>(bits);
      words[i * 2 + 1] = static_cast<uint32_t>(bits >> 32);
    }
  }
}

// The 32 bits that begin `bits` (0 to 31) above the lowest bit of `low`.
SHARDD_ALWAYS_INLINE uint32_t Funnel(uint32_t low, uint32_t high, uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_r(low, high, bits);
#else
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> bits);
#endif
}

// Reads packs of a range whose elements may begin anywhere. One reader serves all packs of a thread, because all packs
// begin at the same offset modulo the width.
template <typename T, int kNumel>
class Reader {
 public:
  using P = Pack<T, kNumel>;
  // `first`: start of the first pack.
  explicit SHARDD_ALWAYS_INLINE Reader(const T* first) : first_(first), shift_(Misaligned(first, P::kWidth)) {}

  // For memory that nobody writes meanwhile. If packs are misaligned, reads and shifts the aligned words around one,
  // which needs a neighbour on either side; reads the two outer packs element by element.
  SHARDD_ALWAYS_INLINE P Read(int64_t pack, int64_t packs) const {
    if (shift_ == 0) return Aligned(pack);
    if (pack == 0 || pack == packs - 1) return Single(pack);
    constexpr int kWords = P::kBytes / 4;
    constexpr int kMore = P::kWidth / 4;
    uint32_t words[kWords + kMore];
    LoadWords<P::kWidth, kWords + kMore>(reinterpret_cast<const char*>(first_ + pack * kNumel) - shift_, words);
    if constexpr (kMore == 4) {
      if (shift_ & 8) Drop<kWords + 2, 2>(words);
    }
    if (shift_ & 4) Drop<kWords + 1, 1>(words);
    SHARDD_UNROLL
    for (int i = 0; i < kWords; ++i) words[i] = Funnel(words[i], words[i + 1], (shift_ & 3) * 8);
    return FromWords<T, kNumel>(words);
  }

  // For memory that is written back: reads only the pack.
  SHARDD_ALWAYS_INLINE P ReadOwn(int64_t pack) const { return shift_ == 0 ? Aligned(pack) : Single(pack); }

 private:
  template <int kCount, int kBy>
  static SHARDD_ALWAYS_INLINE void Drop(uint32_t* words) {
    SHARDD_UNROLL
    for (int i = 0; i < kCount; ++i) words[i] = words[i + kBy];
  }
  SHARDD_ALWAYS_INLINE P Aligned(int64_t pack) const {
    uint32_t words[P::kBytes / 4];
    LoadWords<P::kWidth, P::kBytes / 4>(reinterpret_cast<const char*>(first_ + pack * kNumel), words);
    return FromWords<T, kNumel>(words);
  }
  SHARDD_ALWAYS_INLINE P Single(int64_t pack) const {
    P out;
    SHARDD_UNROLL
    for (int i = 0; i < kNumel; ++i) out.at[i] = first_[pack * kNumel + i];
    return out;
  }

  const T* first_;
  uint32_t shift_;
};

template <typename T, int kNumel>
class Writer {
 public:
  using P = Pack<T, kNumel>;
  explicit SHARDD_ALWAYS_INLINE Writer(T* first) : first_(first), aligned_(Misaligned(first, P::kWidth) == 0) {}
  SHARDD_ALWAYS_INLINE void Write(int64_t pack, const P& values) const {
    T* out = first_ + pack * kNumel;
    if (aligned_) {
      uint32_t words[P::kBytes / 4];
      ToWords(values, words);
      StoreWords<P::kWidth, P::kBytes / 4>(reinterpret_cast<char*>(out), words);
    } else {
      SHARDD_UNROLL
      for (int i = 0; i < kNumel; ++i) out[i] = values.at[i];
    }
  }

 private:
  T* first_;
  bool aligned_;
};

}  // namespace shardd::cuda

#endif  // SHARDD_SERVER_DEVICE_CUDA_KERNELS_PACK_CUH_
