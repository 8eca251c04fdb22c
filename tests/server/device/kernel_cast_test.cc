#include "tests/server/device/kernel_data.h"

namespace shardd::cuda {
namespace {

class KernelCastTest : public KernelTest {
 protected:
  Elements Run(const Elements& src, DType to, float scale = 1, int src_offset = 0, int dst_offset = 0,
               uint32_t grid = 0) {
    const Buffer in(*runner_, src, src_offset);
    const Buffer out(*runner_, MakeElements(to, src.numel()), dst_offset);
    runner_->Launch(CastArgs{in.data(), out.data(), src.numel(), src.dtype, to, scale}, grid);
    ExpectSame(in.Get(), src, Nan::kSameBits);
    return out.Get();
  }
  static Elements Want(const Elements& src, DType to) {
    Elements want = MakeElements(to, src.numel());
    Cast(src.data(), src.dtype, want.data(), to, src.numel());
    return want;
  }
};

// Every bf16 and fp16, and of the wider ones many of each kind.
TEST_F(KernelCastTest, GivesTheBitsOfTheCpu) {
  for (const DType from : kFloating) {
    Elements src = AnyBits(from, 1 << 17, 7);
    if (DTypeSizeBytes(from) == 2) {
      for (int64_t i = 0; i < src.numel(); ++i) {
        const uint16_t bits = static_cast<uint16_t>(i);
        std::memcpy(src.bytes.data() + i * 2, &bits, 2);
      }
    }
    for (const DType to : kFloating) {
      SCOPED_TRACE(::testing::Message() << DTypeName(from) << " to " << DTypeName(to));
      ExpectSame(Run(src, to), Want(src, to), Nan::kSameBits);
    }
  }
}

TEST_F(KernelCastTest, TakesAnyLength) {
  for (const DType from : kFloating) {
    for (const DType to : kFloating) {
      for (int64_t numel = 1; numel <= 40; ++numel) {
        const Elements src = AnyBits(from, numel, static_cast<uint32_t>(numel));
        SCOPED_TRACE(::testing::Message() << DTypeName(from) << " to " << DTypeName(to) << ", " << numel);
        ExpectSame(Run(src, to), Want(src, to), Nan::kSameBits);
      }
    }
  }
}

TEST_F(KernelCastTest, TakesAnyAlignment) {
  for (const DType from : kFloating) {
    for (const DType to : kFloating) {
      const Elements src = AnyBits(from, 83, 3);
      const Elements want = Want(src, to);
      for (int src_offset = 0; src_offset < 16 / DTypeSizeBytes(from); ++src_offset) {
        for (int dst_offset = 0; dst_offset < 16 / DTypeSizeBytes(to); ++dst_offset) {
          SCOPED_TRACE(::testing::Message()
                       << DTypeName(from) << " at " << src_offset << " to " << DTypeName(to) << " at " << dst_offset);
          ExpectSame(Run(src, to, 1, src_offset, dst_offset), want, Nan::kSameBits);
        }
      }
    }
  }
}

TEST_F(KernelCastTest, ScalesBeforeItRounds) {
  for (const DType from : kFloating) {
    const Elements src = AnyBits(from, 5000, 11);
    const DType middle = from == v1::DTYPE_FLOAT64 ? from : v1::DTYPE_FLOAT32;
    for (const float scale : {0.3f, -1024.0f, 1e-30f}) {
      Elements product = Want(src, middle);
      for (int64_t i = 0; i < src.numel(); ++i) {
        if (middle == v1::DTYPE_FLOAT64) {
          reinterpret_cast<double*>(product.data())[i] *= static_cast<double>(scale);
        } else {
          product.floats()[i] *= scale;
        }
      }
      for (const DType to : kFloating) {
        SCOPED_TRACE(::testing::Message() << DTypeName(from) << " to " << DTypeName(to) << " times " << scale);
        ExpectSame(Run(src, to, scale, 1, 3), Want(product, to), Nan::kAnyNan);
      }
    }
  }
}

TEST_F(KernelCastTest, AnyGridGivesTheSame) {
  const Elements src = AnyBits(v1::DTYPE_FLOAT32, 100003, 5);
  const Elements want = Want(src, v1::DTYPE_BFLOAT16);
  for (const uint32_t grid : {1u, 3u, 1000u})
    ExpectSame(Run(src, v1::DTYPE_BFLOAT16, 1, 1, 1, grid), want, Nan::kSameBits);
}

class KernelFiniteTest : public KernelTest {
 protected:
  int32_t Found(const Elements& src, int offset) {
    const Buffer in(*runner_, src, offset);
    const Buffer found(*runner_, MakeElements(v1::DTYPE_INT32, 1));
    runner_->Launch(FiniteArgs{in.data(), src.numel(), src.dtype, static_cast<int32_t*>(found.data())});
    int32_t result = -1;
    std::memcpy(&result, found.Get().data(), sizeof(result));
    return result;
  }
};

TEST_F(KernelFiniteTest, FindsOneWhereverItIs) {
  for (const DType dtype : kFloating) {
    Elements finite = Values(dtype, 45, 1, /*special=*/false);
    const std::vector<float> edges = {1e-41f, 65504, -65504, 0};
    Cast(edges.data(), v1::DTYPE_FLOAT32, finite.data(), dtype, 4);
    for (int offset = 0; offset < 16 / DTypeSizeBytes(dtype); ++offset) {
      EXPECT_EQ(Found(finite, offset), 0) << DTypeName(dtype) << " at " << offset;
    }
    for (int64_t at = 0; at < finite.numel(); ++at) {
      for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()}) {
        Elements src = finite;
        Cast(&bad, v1::DTYPE_FLOAT32, src.bytes.data() + at * DTypeSizeBytes(dtype), dtype, 1);
        EXPECT_EQ(Found(src, static_cast<int>(at) % 3), 1) << DTypeName(dtype) << ", " << bad << " at " << at;
      }
    }
  }
}

}  // namespace
}  // namespace shardd::cuda
