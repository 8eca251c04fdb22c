#include "client/python/extension/shard_order.h"

#include <ATen/Parallel.h>
#include <string.h>

#include <algorithm>

#include "client/python/extension/memory.h"

namespace shardd::python {
namespace {

constexpr int64_t kBytesOfThread = 1 << 18;  // less is not worth another thread

}  // namespace

ShardOrder::ShardOrder(at::IntArrayRef shape, int64_t dim, int64_t parts)
    : shape_(shape.vec()), dim_(dim), parts_(dim == 0 ? 1 : parts) {
  for (int64_t before = 0; before < dim; ++before) {
    blocks_ *= shape_[static_cast<size_t>(before)];
  }
}

void ShardOrder::ToParameter(const void* in_job, void* parameter, int64_t numel, at::ScalarType dtype,
                             at::Device device) const {
  if (numel == 0) {
    return;
  }
  if (!device.is_cpu()) {
    Split(TensorAt(parameter, shape_, dtype, device)).copy_(SplitOfJob(const_cast<void*>(in_job), dtype, device));
    return;
  }
  const auto* from = static_cast<const char*>(in_job);
  auto* to = static_cast<char*>(parameter);
  const int64_t block_bytes = numel / (parts_ * blocks_) * static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t grain = std::max<int64_t>(1, kBytesOfThread / (block_bytes * parts_));
  // The job has [part][block], the parameter [block][part].
  at::parallel_for(0, blocks_, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      for (int64_t part = 0; part < parts_; ++part) {
        memcpy(to + (block * parts_ + part) * block_bytes, from + (part * blocks_ + block) * block_bytes,
               static_cast<size_t>(block_bytes));
      }
    }
  });
}

at::Tensor ShardOrder::SplitOfJob(void* in_job, at::ScalarType dtype, at::Device device) const {
  std::vector<int64_t> sizes = shape_;
  sizes[static_cast<size_t>(dim_)] /= parts_;
  sizes.insert(sizes.begin(), parts_);
  return TensorAt(in_job, sizes, dtype, device).movedim(0, dim_);
}

at::Tensor ShardOrder::Split(const at::Tensor& parameter) const {
  return parameter.unflatten(dim_, {parts_, shape_[static_cast<size_t>(dim_)] / parts_});
}

}  // namespace shardd::python
