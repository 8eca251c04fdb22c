#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NCCL_NCCL_EXCHANGES_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NCCL_NCCL_EXCHANGES_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/collective/nodes/nccl/nccl_exchange.h"

namespace shardd {

// This daemon's exchanges by NCCL, one at a time: a sum holds its GPU's stream until all nodes have reached it, and the
// jobs of several daemons have no common order, so two jobs on the same GPUs would wait for each other for ever.
// Thread-safe.
class NcclExchanges {
 public:
  // `ordinals`: the daemon's GPUs, in order.
  NcclExchanges(const NcclLibrary& library, const CudaDriver& driver, std::vector<int> ordinals)
      : library_(library), driver_(driver), ordinals_(std::move(ordinals)) {}

  // Fills in ordinals, moves and claim: the GPU of rank r of the job is the daemon's r-th, modulo their number; without
  // greetings there are no moves. FAILED_PRECONDITION: another job has the exchange.
  absl::StatusOr<std::unique_ptr<NcclExchange>> Make(const std::string& job, NcclExchange::Options options)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const NcclLibrary library_;
  const CudaDriver driver_;
  const std::vector<int> ordinals_;
  absl::Mutex mutex_;
  std::weak_ptr<std::string> claim_ ABSL_GUARDED_BY(mutex_);  // name of the job that has the exchange
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NCCL_NCCL_EXCHANGES_H_
