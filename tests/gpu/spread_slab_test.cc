// A slab of several allocations, on the real driver: pieces in turns on all GPUs that this process sees. With one GPU
// they are all its own, which shows what mapping side by side asks of the driver; with several, what peer access does.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "common/tensor/kernels.h"
#include "tests/gpu/gpu.h"

namespace shardd::cuda {
namespace {

constexpr size_t kPieces = 6;

TEST(SpreadSlab, CopiesZerosAndKernelsCrossPieceEdgesAlsoWhenImported) {
  std::string why;
  Gpu* const gpu = Gpu::Get(&why);
  if (gpu == nullptr) GTEST_SKIP() << why;
  const CudaDriver& driver = gpu->driver();
  int count = 0;
  ASSERT_EQ(driver->DeviceGetCount(&count), CUDA_SUCCESS);
  std::vector<CUdevice> gpus(static_cast<size_t>(count));
  std::vector<CudaSlab::Piece> pieces;
  std::vector<int64_t> sizes;
  for (int i = 0; i < count; ++i) ASSERT_EQ(driver->DeviceGet(&gpus[static_cast<size_t>(i)], i), CUDA_SUCCESS);
  const int64_t page_bytes = *CudaSlab::Granularity(driver, gpus[0]);
  for (size_t i = 0; i < kPieces; ++i) {
    sizes.push_back(page_bytes * (i % 2 == 0 ? 1 : 2));
    pieces.push_back({gpus[i % gpus.size()], sizes.back()});
  }
  const absl::StatusOr<CudaSlab> made = CudaSlab::CreateSpread(&driver, pieces, "spread", gpus);
  ASSERT_TRUE(made.ok()) << made.status();
  const CudaSlab& slab = *made;
  std::printf("[ GPU      ] %zu pieces on %d GPUs, %lld bytes\n", slab.pieces(), count,
              static_cast<long long>(slab.size_bytes()));
  char* const data = static_cast<char*>(slab.data());
  const int64_t numel = slab.size_bytes() / 4;

  // One copy from the host over all of it, one within it over the edges, and zeros over an edge.
  std::vector<float> want(static_cast<size_t>(numel)), got(want.size(), -1);
  for (size_t i = 0; i < want.size(); ++i) want[i] = static_cast<float>(i % 251) / 8;
  gpu->Copy(want.data(), data, slab.size_bytes());
  gpu->Wait();
  const CudaSlab other = gpu->Allocate(slab.size_bytes());
  gpu->Copy(data, other.data(), slab.size_bytes());
  gpu->Copy(other.data(), got.data(), slab.size_bytes());
  gpu->Wait();
  EXPECT_TRUE(got == want) << "a copy out of it";
  gpu->Copy(static_cast<char*>(other.data()) + 64, data, slab.size_bytes() - 64);
  gpu->Zero(data + page_bytes - 4096, 8192);
  gpu->Copy(data, got.data(), slab.size_bytes());
  gpu->Wait();
  std::memmove(want.data(), want.data() + 16, static_cast<size_t>(slab.size_bytes()) - 64);
  std::memset(reinterpret_cast<char*>(want.data()) + page_bytes - 4096, 0, 8192);
  EXPECT_TRUE(got == want) << "a copy into it";

  // A kernel that reads it from end to end and writes beside it.
  std::vector<uint16_t> cast(want.size()), want_cast(want.size());
  gpu->Launch(CastArgs{data, other.data(), numel, kFloat32, kBFloat16, 1}, 0);
  gpu->Copy(other.data(), cast.data(), numel * 2);
  gpu->Wait();
  Cast(want.data(), v1::DTYPE_FLOAT32, want_cast.data(), v1::DTYPE_BFLOAT16, numel);
  EXPECT_TRUE(cast == want_cast);

  // As a trainer maps it.
  size_t next = 0;
  const absl::StatusOr<CudaSlab> view = CudaSlab::ImportSpread(
      &driver, gpus[0], sizes, [&] { return slab.ExportFd(next++); }, CudaSlab::Access::kReadOnly, "view");
  ASSERT_TRUE(view.ok()) << view.status();
  std::fill(got.begin(), got.end(), -1.0f);
  gpu->Copy(view->data(), got.data(), slab.size_bytes());
  gpu->Wait();
  EXPECT_TRUE(got == want);
}

}  // namespace
}  // namespace shardd::cuda
