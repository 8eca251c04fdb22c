#ifndef SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COMMUNICATOR_H_
#define SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COMMUNICATOR_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/cuda/driver.h"
#include "server/collective/nccl/nccl_library.h"
#include "server/device/device.h"

namespace shardd {

// NCCL over GPUs of this process, one member each. Communicators are non-blocking, so that they can be aborted, and
// calls of one member come one at a time. Sums are of fp32 in NCCL's order, not in that of ranks.
class NcclCommunicator final : public Communicator, public std::enable_shared_from_this<NcclCommunicator> {
 public:
  struct Options {
    // Of making it, and of a call that NCCL has not finished: the issuing thread waits so long.
    absl::Duration limit = absl::Seconds(30);
    // A ring kernel holds so many multiprocessors at most, whatever the policy: trainers compute beside it.
    int max_ctas = 8;
  };
  // One member per ordinal, in that order. Blocks, seconds on real GPUs. DEADLINE_EXCEEDED, INTERNAL: what NCCL said.
  static absl::StatusOr<std::shared_ptr<NcclCommunicator>> Create(const NcclLibrary& library, const CudaDriver& driver,
                                                                  const std::vector<int>& ordinals,
                                                                  const Options& options);
  static absl::StatusOr<std::shared_ptr<NcclCommunicator>> Create(const NcclLibrary& library, const CudaDriver& driver,
                                                                  const std::vector<int>& ordinals) {
    return Create(library, driver, ordinals, Options());
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  // REQUIRES: nothing is under way on the members' streams, or it is broken.
  ~NcclCommunicator() override;

  const std::string& name() const override { return name_; }
  const std::string& details() const override { return details_; }
  int members() const override { return static_cast<int>(members_.size()); }
  absl::Status Enqueue(const SumOp& op, void* stream) override;
  void Break(const absl::Status& why) override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status broken() const override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Member {
    std::string device;  // "cuda:0"
    cu::Ordinal ordinal = 0;
    cu::Context context = nullptr;
    absl::Mutex mutex;  // NCCL takes one call of a communicator at a time; an abort none beside it
    nccl::Comm comm ABSL_GUARDED_BY(mutex) = nullptr;  // null: aborted
  };
  NcclCommunicator(const NcclLibrary& library, const CudaDriver& driver, const Options& options)
      : library_(library), driver_(driver), options_(options) {}
  absl::Status Init(const std::vector<int>& ordinals);
  absl::Status EnqueueParts(const Member& member, nccl::Comm comm, const SumOp& op, void* stream);
  // Until the library has done what was called; DEADLINE_EXCEEDED after the limit, CANCELLED when it is broken
  // meanwhile.
  absl::Status Await(const std::string& device, nccl::Comm comm, const char* operation) ABSL_LOCKS_EXCLUDED(mutex_);
  void AbortAll();

  // Constant after Create.
  const NcclLibrary library_;
  const CudaDriver driver_;
  const Options options_;
  std::string name_;
  std::string details_;
  std::vector<std::unique_ptr<Member>> members_;

  // Guarded.
  mutable absl::Mutex mutex_;
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COMMUNICATOR_H_
