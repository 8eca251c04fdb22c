#include "server/collective/nodes/nccl/nccl_exchanges.h"

#include "common/status/status_macros.h"

namespace shardd {

absl::StatusOr<std::unique_ptr<NcclExchange>> NcclExchanges::Make(const std::string& job,
                                                                  NcclExchange::Options options) {
  SHARDD_ASSIGN_OR_RETURN(options.seat, turns_->Enter(job, options.addresses));
  for (size_t rank = 0; rank < options.devices.size(); ++rank) {
    options.ordinals.push_back(ordinals_[rank % ordinals_.size()]);
  }
  options.moves = !options.greetings.empty();
  return std::make_unique<NcclExchange>(library_, driver_, std::move(options));
}

}  // namespace shardd
