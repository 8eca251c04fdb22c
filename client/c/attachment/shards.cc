#include "client/c/attachment/shards.h"

namespace shardd {

const char* StoredParameterAt(const Attachment& attachment, int param, int64_t copy) {
  const RankPlan& plan = attachment.plan();
  const FlatParamPlan& flat = plan.flat_of(plan.param(param));
  return attachment.memory().shards() + copy * plan.plan().shards_stride_bytes + flat.shards_offset_bytes +
         plan.param(param).offset * DTypeSizeBytes(flat.dtype);
}

char* ReducedGradientAt(const Attachment& attachment, int param, int64_t copy) {
  const RankPlan& plan = attachment.plan();
  const FlatParamPlan& flat = plan.flat_of(plan.param(param));
  if (attachment.memory().gradients() == nullptr || flat.gradients_offset_bytes < 0) {
    return nullptr;
  }
  return attachment.memory().gradients() + copy * plan.plan().gradients_stride_bytes + flat.gradients_offset_bytes +
         plan.param(param).offset * DTypeSizeBytes(v1::DTYPE_FLOAT32);
}

}  // namespace shardd
