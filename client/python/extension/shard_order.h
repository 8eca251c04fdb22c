#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_SHARD_ORDER_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_SHARD_ORDER_H_

// In which order the job has the elements of a parameter. It has shards, one behind the other. Shards on the first
// dimension are rows, and so the parameter itself. Those on another are each contiguous in the shape of a shard, and
// lie in the parameter as blocks with blocks of the other ranks between them. Immutable.

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

namespace shardd::python {

class ShardOrder {
 public:
  // A parameter of this shape, cut into `parts` equal shards on dimension `dim`; of rows, `parts` does not matter.
  ShardOrder(at::IntArrayRef shape, int64_t dim, int64_t parts);

  // The job's order is the parameter's: nothing has to be moved.
  bool is_parameters() const { return parts_ == 1 || blocks_ == 1; }

  // Copies what the job has, `numel` elements, into a contiguous tensor of the parameter's shape, both on `device`.
  // Without the GIL or with it; on the host no operation that torch's dispatch modes see.
  void ToParameter(const void* in_job, void* parameter, int64_t numel, at::ScalarType dtype, at::Device device) const;

  // A tensor over `in_job` and a view of `parameter` with the same sizes, where is_parameters() is false: the dimension
  // that is cut is two, the shard and the place in it.
  at::Tensor SplitOfJob(void* in_job, at::ScalarType dtype, at::Device device) const;
  at::Tensor Split(const at::Tensor& parameter) const;

 private:
  const std::vector<int64_t> shape_;
  const int64_t dim_;
  const int64_t parts_;
  int64_t blocks_ = 1;  // of each shard
};

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_SHARD_ORDER_H_
