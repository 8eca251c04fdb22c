#ifndef SHARDD_CLIENT_C_GPU_DEVICE_SLABS_H_
#define SHARDD_CLIENT_C_GPU_DEVICE_SLABS_H_

#include <array>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/slab.h"
#include "common/plan/plan.h"
#include "common/shm/fd_channel.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

// The slabs of a session that lie on a GPU, mapped for the rank's GPU. Empty: all are the host's. Move-only.
class DeviceSlabs {
 public:
  // More descriptors of the session: of pieces of slabs that lie on several GPUs.
  using Fetch = std::function<absl::StatusOr<std::vector<UniqueFd>>(FdRange)>;

  // Takes their descriptors out of `fds`, and those of further pieces from `fetch`, whose errors are passed on.
  // FAILED_PRECONDITION: no driver here, or this process does not see the GPU, with what to do; INTERNAL: `attach` does
  // not describe the slabs of `plan`; errors of CudaSlab::ImportSpread otherwise.
  static absl::StatusOr<DeviceSlabs> Map(const v1::AttachRankResponse& attach, const ShardPlan& plan,
                                         std::vector<UniqueFd>& fds, const Fetch& fetch);

  // Of this process. REQUIRES: some session's slabs were mapped.
  static const CudaDriver& driver();

  bool empty() const { return ordinal_ < 0; }
  int ordinal() const { return ordinal_; }  // of the rank's GPU, as this process numbers them; -1: empty
  bool has(SessionFd which) const { return slabs_[which].valid(); }
  // Where it begins, for kernels and copies of the GPU; null: it is not there.
  char* at(SessionFd which) const { return static_cast<char*>(slabs_[which].data()); }
  int64_t size_bytes(SessionFd which) const { return slabs_[which].size_bytes(); }  // as it is mapped; 0: not there

 private:
  int ordinal_ = -1;
  std::array<CudaSlab, kSessionFdCount> slabs_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_GPU_DEVICE_SLABS_H_
