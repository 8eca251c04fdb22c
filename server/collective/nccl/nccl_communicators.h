#ifndef SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COMMUNICATORS_H_
#define SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COMMUNICATORS_H_

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/collective/nccl/nccl_communicator.h"

namespace shardd {

// The communicators of this daemon: one for every number of ranks, because rank r is on the daemon's r-th GPU. Each is
// made when the first job of that size opens, and all such jobs share it. With windows every job has its own: a
// registration that fails affects all users of a communicator. Thread-safe.
class NcclCommunicators {
 public:
  // `ordinals`: the daemon's GPUs, in order.
  NcclCommunicators(const NcclLibrary& library, const CudaDriver& driver, std::vector<int> ordinals,
                    bool windows = false)
      : library_(library), driver_(driver), ordinals_(std::move(ordinals)), windows_(windows) {}

  // The communicator for so many ranks; a broken one is made anew. May block for seconds. FAILED_PRECONDITION: NCCL is
  // of no use here, or refuses; the text is shown in status.
  absl::StatusOr<std::shared_ptr<NcclCommunicator>> For(int ranks) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const NcclLibrary library_;
  const CudaDriver driver_;
  const std::vector<int> ordinals_;
  const bool windows_;
  absl::Mutex mutex_;
  absl::flat_hash_map<int, std::shared_ptr<NcclCommunicator>> by_ranks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COMMUNICATORS_H_
