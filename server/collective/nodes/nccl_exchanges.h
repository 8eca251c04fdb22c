#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NCCL_EXCHANGES_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NCCL_EXCHANGES_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/collective/nodes/nccl_exchange.h"

namespace shardd {

// The exchanges by NCCL of this daemon: one at a time. A sum holds its GPU's stream until all nodes have come to it,
// and no order is common to the jobs of several daemons: two jobs on the same GPUs would wait for each other, for ever.
// Thread-safe.
class NcclExchanges {
 public:
  // `ordinals`: of the daemon's GPUs, in their order.
  NcclExchanges(const NcclLibrary& library, const CudaDriver& driver, std::vector<int> ordinals)
      : library_(library), driver_(driver), ordinals_(std::move(ordinals)) {}

  // `devices`: by rank of the job, rank r's being the daemon's r-th, from the first again where there are fewer. For
  // `send`: NcclExchange::Options. FAILED_PRECONDITION: another job has one.
  absl::StatusOr<std::unique_ptr<NcclExchange>> Make(const std::string& job, int node, int nodes,
                                                     std::vector<Device*> devices,
                                                     std::function<void(int node, v1::PeerMessage message)> send)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const NcclLibrary library_;
  const CudaDriver driver_;
  const std::vector<int> ordinals_;
  absl::Mutex mutex_;
  std::weak_ptr<std::string> claim_ ABSL_GUARDED_BY(mutex_);  // the name of the job that has one
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NCCL_EXCHANGES_H_
