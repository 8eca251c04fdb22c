#include "server/collective/nodes/nccl/lazy_exchanges.h"

#include <utility>

#include "common/status/status_macros.h"
#include "server/device/devices.h"

namespace shardd {

LazyExchanges::LazyExchanges(const CudaDriver& driver, const std::vector<GpuFacts>& gpus, std::string library)
    : driver_(driver), library_(std::move(library)) {
  for (const GpuFacts& gpu : gpus) ordinals_.push_back(gpu.ordinal);
}

absl::StatusOr<NcclExchanges*> LazyExchanges::Get() {
  absl::MutexLock lock(&mutex_);
  if (exchanges_ == nullptr) {
    SHARDD_ASSIGN_OR_RETURN(const NcclLibrary library, NcclLibrary::Load(library_));
    exchanges_ = std::make_unique<NcclExchanges>(library, driver_, ordinals_);
  }
  return exchanges_.get();
}

}  // namespace shardd
