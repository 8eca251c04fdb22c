#include "client/c/job/optimizer_state.h"

#include "common/tensor/dtype.h"

namespace shardd {

void* OptimizerState::Data(int index, int state) {
  const ShardPlan& plan = attachment_.plan().plan();
  const ParamPlan& param = attachment_.plan().param(index);
  const FlatParamPlan& flat = attachment_.plan().flat_of(param);
  if (flat.optimizer_offset_bytes < 0 || state < 0 || state >= flat.optimizer_states) {
    return nullptr;
  }
  const bool mapped = attachment_.memory().optimizer_slab().data() != nullptr;
  char* const base = attachment_.memory().optimizer();
  if (base == nullptr) {
    return nullptr;
  }
  if (!mapped) {
    read_only_.OnMapped();
  }
  return base + attachment_.plan().copy_of(plan.optimizer_copies) * plan.optimizer_stride_bytes +
         flat.optimizer_offset_bytes + state * flat.StateStrideBytes() +
         param.offset * DTypeSizeBytes(v1::DTYPE_FLOAT32);
}

}  // namespace shardd
