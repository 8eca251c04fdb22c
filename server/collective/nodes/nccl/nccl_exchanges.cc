#include "server/collective/nodes/nccl/nccl_exchanges.h"

#include "absl/strings/str_cat.h"

namespace shardd {

absl::StatusOr<std::unique_ptr<NcclExchange>> NcclExchanges::Make(const std::string& job,
                                                                  NcclExchange::Options options) {
  auto claim = std::make_shared<std::string>(job);
  {
    absl::MutexLock lock(&mutex_);
    if (const auto other = claim_.lock(); other != nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("open job \"", job,
                       "\": gradients of several nodes are added by NCCL for one job at a time on a daemon's "
                       "GPUs, and job \"",
                       *other, "\" is there; close that one, or use a daemon on other GPUs"));
    }
    claim_ = claim;
  }
  for (size_t rank = 0; rank < options.devices.size(); ++rank) {
    options.ordinals.push_back(ordinals_[rank % ordinals_.size()]);
  }
  options.moves = !options.greetings.empty();
  options.claim = std::move(claim);
  return std::make_unique<NcclExchange>(library_, driver_, std::move(options));
}

}  // namespace shardd
