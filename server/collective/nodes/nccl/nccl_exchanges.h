#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NCCL_NCCL_EXCHANGES_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NCCL_NCCL_EXCHANGES_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/collective/nodes/nccl/nccl_exchange.h"
#include "server/collective/nodes/nccl/node_turns.h"

namespace shardd {

// This daemon's exchanges by NCCL, of at most two jobs at a time, which take turns (node_turns.h). Thread-safe.
class NcclExchanges {
 public:
  // `ordinals`: the daemon's GPUs, in order.
  NcclExchanges(const NcclLibrary& library, const CudaDriver& driver, std::vector<int> ordinals)
      : library_(library), driver_(driver), ordinals_(std::move(ordinals)), turns_(std::make_shared<NodeTurns>()) {}

  // Fills in ordinals, moves and seat: the GPU of rank r of the job is the daemon's r-th, modulo their number; without
  // greetings there are no moves. Errors as NodeTurns::Enter.
  absl::StatusOr<std::unique_ptr<NcclExchange>> Make(const std::string& job, NcclExchange::Options options);

 private:
  const NcclLibrary library_;
  const CudaDriver driver_;
  const std::vector<int> ordinals_;
  const std::shared_ptr<NodeTurns> turns_;  // exchanges leave it when they end, which may be later
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NCCL_NCCL_EXCHANGES_H_
