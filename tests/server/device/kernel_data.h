#ifndef SHARDD_TESTS_SERVER_DEVICE_KERNEL_DATA_H_
#define SHARDD_TESTS_SERVER_DEVICE_KERNEL_DATA_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "common/tensor/kernels.h"
#include "tests/server/device/kernel_runner.h"

namespace shardd::cuda {

inline constexpr DType kTrainable[] = {v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16};
inline constexpr DType kFloating[] = {v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16, v1::DTYPE_FLOAT64};
static_assert(v1::DTYPE_UNSPECIFIED == kNoDType && v1::DTYPE_FLOAT32 == kFloat32 && v1::DTYPE_BFLOAT16 == kBFloat16 &&
              v1::DTYPE_FLOAT16 == kFloat16 && v1::DTYPE_FLOAT64 == kFloat64);

// Elements of one dtype on the host.
struct Elements {
  DType dtype;
  std::vector<char> bytes;
  int64_t numel() const { return static_cast<int64_t>(bytes.size()) / DTypeSizeBytes(dtype); }
  void* data() { return bytes.data(); }
  const void* data() const { return bytes.data(); }
  float* floats() { return reinterpret_cast<float*>(bytes.data()); }
};
inline Elements MakeElements(DType dtype, int64_t numel) {
  return {dtype, std::vector<char>(static_cast<size_t>(numel * DTypeSizeBytes(dtype)))};
}

// Any bits: NaNs of all kinds, infinities, denormals. Half of fp32 and fp64 lie where narrower types round.
inline Elements AnyBits(DType dtype, int64_t numel, uint32_t seed) {
  std::mt19937_64 random(seed);
  Elements out = MakeElements(dtype, numel);
  const int64_t width = DTypeSizeBytes(dtype);
  for (int64_t i = 0; i < numel; ++i) {
    uint64_t bits = random();
    if (dtype == v1::DTYPE_FLOAT64 && i % 2 == 0) {
      // In the range of fp32 and its denormals; the last bits are those that decide a tie.
      const double near = std::ldexp(1 + static_cast<double>(bits >> 50) / 16384, static_cast<int>(bits % 300) - 155);
      std::memcpy(&bits, &near, sizeof(near));
      bits += random() % 5 - 2;
    }
    if (dtype == v1::DTYPE_FLOAT32 && i % 2 == 0) {
      const float near = std::ldexp(1 + static_cast<float>(bits >> 52) / 4096, static_cast<int>(bits % 46) - 28);
      uint32_t low = 0;
      std::memcpy(&low, &near, sizeof(near));
      bits = low + static_cast<uint32_t>(random() % 5) - 2;
    }
    std::memcpy(out.bytes.data() + i * width, &bits, static_cast<size_t>(width));
  }
  return out;
}

// Values around 1, and where `special` every 50th an infinity, a NaN, a denormal, a zero or the largest.
inline Elements Values(DType dtype, int64_t numel, uint32_t seed, bool special = true) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kSpecial[] = {kInf, -kInf, std::numeric_limits<float>::quiet_NaN(), 1e-41f, -3e-39f, 6e-8f,
                                0,    -0.0f, std::numeric_limits<float>::max(),       65504,  1e-30f};
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(numel));
  for (int64_t i = 0; i < numel; ++i) {
    values[static_cast<size_t>(i)] = special && i % 50 == seed % 50 ? kSpecial[i / 50 % 11] : normal(random);
  }
  Elements out = MakeElements(dtype, numel);
  Cast(values.data(), v1::DTYPE_FLOAT32, out.data(), dtype, numel);
  return out;
}

// A copy of elements in a runner's memory, `offset` elements from where 256 bytes are aligned, between guards that Get
// checks.
class Buffer {
 public:
  Buffer(KernelRunner& runner, const Elements& content, int64_t offset = 0)
      : runner_(runner),
        dtype_(content.dtype),
        before_(kGuard + offset * DTypeSizeBytes(dtype_)),
        size_bytes_(static_cast<int64_t>(content.bytes.size())) {
    std::vector<char> all(static_cast<size_t>(before_ + size_bytes_ + kGuard), kFill);
    std::copy(content.bytes.begin(), content.bytes.end(), all.begin() + before_);
    base_ = runner.Allocate(static_cast<int64_t>(all.size()));
    runner.Write(all.data(), base_, static_cast<int64_t>(all.size()));
  }
  void* data() const { return base_ + before_; }
  float* floats() const { return reinterpret_cast<float*>(base_ + before_); }
  Elements Get() const {
    std::vector<char> all(static_cast<size_t>(before_ + size_bytes_ + kGuard));
    runner_.Read(base_, all.data(), static_cast<int64_t>(all.size()));
    const auto first = all.begin() + before_, end = first + size_bytes_;
    const auto spoilt = [](char c) { return c != kFill; };
    EXPECT_TRUE(std::none_of(all.begin(), first, spoilt)) << "written before the range";
    EXPECT_TRUE(std::none_of(end, all.end(), spoilt)) << "written behind the range";
    return {dtype_, std::vector<char>(first, end)};
  }

 private:
  static constexpr int64_t kGuard = 256;
  static constexpr char kFill = 0x5a;
  KernelRunner& runner_;
  DType dtype_;
  int64_t before_;
  int64_t size_bytes_;
  char* base_;
};

inline bool IsNanAt(const Elements& elements, int64_t i) {
  double value = 0;
  Cast(elements.bytes.data() + i * DTypeSizeBytes(elements.dtype), elements.dtype, &value, v1::DTYPE_FLOAT64, 1);
  return std::isnan(value);
}
enum class Nan { kSameBits, kAnyNan };
// The same bits; with kAnyNan one NaN is like another.
inline void ExpectSame(const Elements& got, const Elements& want, Nan nan) {
  ASSERT_EQ(got.bytes.size(), want.bytes.size());
  if (got.bytes == want.bytes) return;
  const size_t width = static_cast<size_t>(DTypeSizeBytes(want.dtype));
  int shown = 0;
  for (int64_t i = 0; i < want.numel() && shown < 5; ++i) {
    uint64_t g = 0, w = 0;
    std::memcpy(&g, got.bytes.data() + static_cast<size_t>(i) * width, width);
    std::memcpy(&w, want.bytes.data() + static_cast<size_t>(i) * width, width);
    if (g == w || (nan == Nan::kAnyNan && IsNanAt(got, i) && IsNanAt(want, i))) continue;
    ADD_FAILURE() << "element " << i << " of " << want.numel() << ": got bits " << std::hex << g << ", want " << w;
    ++shown;
  }
}

}  // namespace shardd::cuda

#endif  // SHARDD_TESTS_SERVER_DEVICE_KERNEL_DATA_H_
