#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_SHARD_ORDER_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_SHARD_ORDER_H_

// In which order the job has the elements of a parameter. It has shards, one behind the other. Shards on the first
// dimension are rows, and so the parameter itself. Those on another are each contiguous in the shape of a shard, and
// lie in the parameter as blocks with blocks of the other ranks between them. A parameter that is cut over some ranks
// of the job alone (experts on a mesh of their own) has some of the job's rows; the others are other ranks' parameters
// of that name. Immutable.

#include <ATen/ATen.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace shardd::python {

// Which rows of what the job has are the parameter's: each holds a shard, and padding behind it.
struct RowsInJob {
  int64_t rows = 0;  // that the job has; 0: all of it is the parameter's, without padding
  int64_t row_numel = 0;
  int64_t first = 0;  // row of the first shard, and how many rows further the next ones are
  int64_t step = 1;
};

class ShardOrder {
 public:
  // A parameter of this shape, cut into `parts` shards on dimension `dim`: equal ones, or `in_job` says where they are,
  // cut as torch.chunk cuts. Of rows that are all the parameter's, `parts` does not matter.
  ShardOrder(at::IntArrayRef shape, int64_t dim, int64_t parts, RowsInJob in_job = {});

  // The job's order is the parameter's: nothing has to be moved.
  bool is_parameters() const { return !is_some_rows() && (parts_ == 1 || blocks_ == 1); }
  // The job has more under that name than the parameter.
  bool is_some_rows() const { return in_job_.rows > 0; }
  int64_t job_numel() const { return in_job_.rows * in_job_.row_numel; }  // REQUIRES: is_some_rows()

  // Copies what the job has, `numel` elements, into a contiguous tensor of the parameter's shape, both on `device`.
  // Without the GIL or with it; on the host no operation that torch's dispatch modes see.
  void ToParameter(const void* in_job, void* parameter, int64_t numel, at::ScalarType dtype, at::Device device) const;

  // A tensor over `in_job` and a view of `parameter` with the same sizes, where is_parameters() and is_some_rows() are
  // false: the dimension that is cut is two, the shard and the place in it.
  at::Tensor SplitOfJob(void* in_job, at::ScalarType dtype, at::Device device) const;
  at::Tensor Split(const at::Tensor& parameter) const;
  // The same by shards, where is_some_rows(): pairs of views of `in_job`, one-dimensional over all of the job's, and of
  // `parameter`, with the same sizes. Shards without an element have none.
  std::vector<std::pair<at::Tensor, at::Tensor>> Shards(const at::Tensor& in_job, const at::Tensor& parameter) const;

 private:
  void RowsToParameter(const char* in_job, char* parameter, int64_t element_bytes) const;

  const std::vector<int64_t> shape_;
  const int64_t dim_;
  const int64_t parts_;
  const RowsInJob in_job_;
  int64_t blocks_ = 1;  // of each shard
  int64_t inner_ = 1;   // elements for each index of the dimension that is cut
};

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_SHARD_ORDER_H_
