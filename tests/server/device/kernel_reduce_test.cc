#include <absl/types/span.h>

#include "tests/server/device/kernel_data.h"

namespace shardd::cuda {
namespace {

struct ReduceCase {
  int sources = 2;
  DType dtype = v1::DTYPE_FLOAT32;
  DType reduce_dtype = v1::DTYPE_UNSPECIFIED;
  DType keep = v1::DTYPE_UNSPECIFIED;
  float scale = 1;
  bool accumulate = false;
  int64_t numel = 1000;
  int dst_offset = 0;
  int source_offset = 0;  // of the first; the next ones are one element further each
};

class KernelReduceTest : public KernelTest {
 protected:
  void Check(const ReduceCase& c) {
    SCOPED_TRACE(::testing::Message() << c.sources << " of " << DTypeName(c.dtype) << " reduced in "
                                      << DTypeName(c.reduce_dtype) << " kept in " << DTypeName(c.keep) << " times "
                                      << c.scale << (c.accumulate ? " accumulated, " : ", ") << c.numel << " at "
                                      << c.dst_offset << " from " << c.source_offset);
    Elements want = Values(v1::DTYPE_FLOAT32, c.numel, 99);
    const Buffer dst(*runner_, want, c.dst_offset);
    ReduceArgs args = {};
    std::vector<Elements> sources;
    for (int k = 0; k < c.sources; ++k) {
      sources.push_back(Values(c.dtype, c.numel, static_cast<uint32_t>(k)));
      args.sources[k] = Buffer(*runner_, sources.back(), (c.source_offset + k) % 8).data();
    }
    args.source_count = c.sources;
    args.source_dtype = c.dtype;
    args.reduce_dtype = c.reduce_dtype;
    args.keep = c.keep;
    args.scale = c.scale;
    args.accumulate = c.accumulate;
    args.dst = dst.floats();
    args.numel = c.numel;
    runner_->Launch(args);

    std::vector<const void*> host;
    for (const Elements& source : sources) host.push_back(source.data());
    ReduceSources(host, c.dtype, c.reduce_dtype, c.keep, c.scale, c.accumulate, want.floats(), c.numel);
    ExpectSame(dst.Get(), want, Nan::kAnyNan);
  }
};

TEST_F(KernelReduceTest, AddsInRankOrderWhateverIsRoundedAndKept) {
  for (const DType dtype : kTrainable) {
    for (const DType reduce_dtype : {v1::DTYPE_UNSPECIFIED, v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16}) {
      for (const DType keep : {v1::DTYPE_UNSPECIFIED, v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16}) {
        for (const bool accumulate : {false, true}) {
          Check({.sources = 3,
                 .dtype = dtype,
                 .reduce_dtype = reduce_dtype,
                 .keep = keep,
                 .scale = 1.0f / 3,
                 .accumulate = accumulate,
                 .dst_offset = 1});
        }
      }
    }
  }
}

TEST_F(KernelReduceTest, TakesAnyNumberOfSources) {
  for (const DType dtype : kTrainable) {
    for (const int sources : {1, 2, 3, 4, 5, 6, 7, 8, 9, 17, kMaxReduceSources}) {
      Check({.sources = sources, .dtype = dtype, .scale = 0.25f, .accumulate = sources % 2 == 0, .numel = 500});
    }
  }
}

TEST_F(KernelReduceTest, TakesAnyLengthAndAlignment) {
  for (const DType dtype : kTrainable) {
    for (int64_t numel = 1; numel <= 40; ++numel)
      Check({.sources = 3, .dtype = dtype, .accumulate = true, .numel = numel});
    for (int dst_offset = 0; dst_offset < 4; ++dst_offset) {
      for (int source_offset = 0; source_offset < 8; ++source_offset) {
        Check({.sources = 5,
               .dtype = dtype,
               .accumulate = true,
               .numel = 75,
               .dst_offset = dst_offset,
               .source_offset = source_offset});
      }
    }
  }
}

}  // namespace
}  // namespace shardd::cuda
