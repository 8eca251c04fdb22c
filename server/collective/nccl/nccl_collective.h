#ifndef SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COLLECTIVE_H_
#define SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COLLECTIVE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/collective/collective.h"
#include "server/collective/local/local_collective.h"

namespace shardd {

// Ranks on GPUs of their own, on this node. Sums of fp32 gradients that every rank submitted go through the
// communicator, into the slot of the rank whose part they are; its device then scales them into the gradient shards.
// Everything else is `local/`'s: gathers, other dtypes, what not every rank has, all once the communicator is broken. A
// job's ranks use the communicator with one stream each, and a request is one operation per device, so the order is
// that of requests. Thread-safe.
class NcclCollective final : public Collective {
 public:
  // devices[r] is rank r's and the communicator's member r. REQUIRES: as many devices as members.
  NcclCollective(std::vector<Device*> devices, std::shared_ptr<Communicator> communicator);
  const char* name() const override { return "nccl"; }
  std::string Describe() const override;
  void ReduceScatter(ReduceScatterRequest request, Done done) override;
  void AllGather(AllGatherRequest request, Done done) override {
    local_.AllGather(std::move(request), std::move(done));
  }

 private:
  const std::vector<Device*> devices_;
  const std::shared_ptr<Communicator> communicator_;
  LocalCollective local_;
  // Elements that were summed, each counted once.
  std::atomic<uint64_t> by_nccl_ = 0;
  std::atomic<uint64_t> by_copies_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COLLECTIVE_H_
