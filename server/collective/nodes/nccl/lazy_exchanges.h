#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NCCL_LAZY_EXCHANGES_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NCCL_LAZY_EXCHANGES_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/collective/nodes/nccl/nccl_exchanges.h"

namespace shardd {

struct GpuFacts;

// Exchanges by NCCL for jobs that span several nodes; loads NCCL when the first such job opens. Lives as long as the
// process. Thread-safe.
class LazyExchanges {
 public:
  // `library`: NCCL's name or path.
  LazyExchanges(const CudaDriver& driver, const std::vector<GpuFacts>& gpus, std::string library);
  // Of this object. Errors as NcclLibrary::Load, which is tried again the next time.
  absl::StatusOr<NcclExchanges*> Get() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const CudaDriver driver_;
  const std::string library_;
  std::vector<int> ordinals_;
  absl::Mutex mutex_;
  std::unique_ptr<NcclExchanges> exchanges_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NCCL_LAZY_EXCHANGES_H_
