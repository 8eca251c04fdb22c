#include "client/c/attachment/shards.h"

#include "absl/strings/str_cat.h"

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

std::string NameAt(const Attachment& attachment, const void* address) {
  const RankPlan& plan = attachment.plan();
  const SessionMemory& memory = attachment.memory();
  for (const ParamPlan& param : plan.plan().params) {
    const int64_t element_bytes = DTypeSizeBytes(param.dtype);
    const char* begin =
        memory.shards_slab().At<const char>(plan.flat_of(param).shards_offset_bytes) + param.offset * element_bytes;
    if (address >= begin && address < begin + param.numel * element_bytes) {
      return absl::StrCat("parameter \"", param.fqn, "\"");
    }
  }
  return "padding";
}

}  // namespace shardd
