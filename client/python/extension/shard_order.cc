#include "client/python/extension/shard_order.h"

#include <ATen/Parallel.h>
#include <string.h>

#include <algorithm>

#include "client/python/extension/memory.h"

namespace shardd::python {
namespace {

constexpr int64_t kBytesOfThread = 1 << 18;  // less is not worth another thread

}  // namespace

ShardOrder::ShardOrder(at::IntArrayRef shape, int64_t dim, int64_t parts, RowsInJob in_job)
    : shape_(shape.vec()), dim_(dim), parts_(dim == 0 && in_job.rows == 0 ? 1 : parts), in_job_(in_job) {
  for (int64_t before = 0; before < dim; ++before) {
    blocks_ *= shape_[static_cast<size_t>(before)];
  }
  for (size_t behind = static_cast<size_t>(dim) + 1; behind < shape_.size(); ++behind) {
    inner_ *= shape_[behind];
  }
}

void ShardOrder::ToParameter(const void* in_job, void* parameter, int64_t numel, at::ScalarType dtype,
                             at::Device device) const {
  if (numel == 0) {
    return;
  }
  if (is_some_rows()) {
    if (device.is_cpu()) {
      RowsToParameter(static_cast<const char*>(in_job), static_cast<char*>(parameter),
                      static_cast<int64_t>(c10::elementSize(dtype)));
      return;
    }
    const at::Tensor all = TensorAt(const_cast<void*>(in_job), {job_numel()}, dtype, device);
    for (const auto& [row, part] : Shards(all, TensorAt(parameter, shape_, dtype, device))) {
      part.copy_(row);
    }
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

void ShardOrder::RowsToParameter(const char* in_job, char* parameter, int64_t element_bytes) const {
  const int64_t length = shape_[static_cast<size_t>(dim_)];
  const int64_t chunk = (length + parts_ - 1) / parts_;  // as torch.chunk cuts
  const int64_t grain = std::max<int64_t>(1, kBytesOfThread / std::max<int64_t>(1, chunk * inner_ * element_bytes));
  at::parallel_for(0, blocks_ * parts_, grain, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t block = index / parts_;
      const int64_t part = index % parts_;
      const int64_t first = std::min(part * chunk, length);
      const int64_t size = std::min(chunk, length - first) * inner_;
      const int64_t row = in_job_.first + part * in_job_.step;
      memcpy(parameter + (block * length + first) * inner_ * element_bytes,
             in_job + (row * in_job_.row_numel + block * size) * element_bytes,
             static_cast<size_t>(size * element_bytes));
    }
  });
}

std::vector<std::pair<at::Tensor, at::Tensor>> ShardOrder::Shards(const at::Tensor& in_job,
                                                                  const at::Tensor& parameter) const {
  std::vector<std::pair<at::Tensor, at::Tensor>> shards;
  const int64_t length = shape_[static_cast<size_t>(dim_)];
  const int64_t chunk = (length + parts_ - 1) / parts_;
  for (int64_t part = 0; part < parts_; ++part) {
    const int64_t first = std::min(part * chunk, length);
    const at::Tensor of_parameter = parameter.narrow(dim_, first, std::min(chunk, length - first));
    if (of_parameter.numel() > 0) {
      const int64_t row = in_job_.first + part * in_job_.step;
      shards.emplace_back(in_job.narrow(0, row * in_job_.row_numel, of_parameter.numel()).view(of_parameter.sizes()),
                          of_parameter);
    }
  }
  return shards;
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
