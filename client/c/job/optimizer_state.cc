#include "client/c/job/optimizer_state.h"

#include <errno.h>
#include <string.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace shardd {

void OptimizerState::Reset() {
  stored_into_.clear();
  loaded_ = false;
}

void* OptimizerState::Data(int index, int state) {
  const ShardPlan& plan = attachment_.plan().plan();
  const ParamPlan& param = attachment_.plan().param(index);
  const FlatParamPlan& flat = attachment_.plan().flat_of(param);
  if (flat.optimizer_offset_bytes < 0 || state < 0 || state >= plan.optimizer_states) {
    return nullptr;
  }
  const bool mapped = attachment_.memory().optimizer_slab().data() != nullptr;
  char* const base = attachment_.memory().optimizer();
  if (base == nullptr) {
    return nullptr;
  }
  if (!mapped) {
    watch_.OnSlabMapped();
  }
  return base + attachment_.plan().copy_of(plan.optimizer_copies) * plan.optimizer_stride_bytes +
         flat.optimizer_offset_bytes + state * flat.StateStrideBytes() +
         param.offset * DTypeSizeBytes(v1::DTYPE_FLOAT32);
}

absl::Status OptimizerState::CheckStored(const char* call) const {
  return stored_into_.empty() ? absl::OkStatus()
                              : absl::FailedPreconditionError(absl::StrCat(
                                    call, " job \"", attachment_.plan().job(), "\": ", stored_into_,
                                    " was written in place, and it is the daemon's (rank=", attachment_.rank(),
                                    "); load it into the optimizer first"));
}

bool OptimizerState::IsDaemons(const void* address) const {
  const MappedSlab& slab = attachment_.memory().optimizer_slab();
  return !attachment_.plan().trainers_optimize() && slab.data() != nullptr && address >= slab.data() &&
         address < slab.At<const char>(slab.size_bytes());
}

absl::Status OptimizerState::Committed() {
  if (!std::exchange(loaded_, false) || std::exchange(stored_into_, std::string()).empty() ||
      attachment_.memory().optimizer_slab().MakeShared()) {
    return absl::OkStatus();
  }
  return attachment_.Note(absl::InternalError(absl::StrCat("commit_parameters job \"", attachment_.plan().job(),
                                                           "\": map the optimizer state: ", strerror(errno))));
}

}  // namespace shardd
