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
    const FlatParamPlan& flat = plan.flat_of(param);
    const auto holds = [&](const MappedSlab& slab, int64_t offset_bytes, int64_t element_bytes) {
      if (slab.data() == nullptr || offset_bytes < 0) {
        return false;  // the group has none there
      }
      const char* begin = slab.At<const char>(offset_bytes) + param.offset * element_bytes;
      return address >= begin && address < begin + param.numel * element_bytes;
    };
    if (holds(memory.shards_slab(), flat.shards_offset_bytes, DTypeSizeBytes(param.dtype))) {
      return absl::StrCat("parameter \"", param.fqn, "\"");
    }
    if (holds(memory.parameters_slab(), flat.params_offset_bytes, DTypeSizeBytes(flat.unsharded_dtype))) {
      return absl::StrCat("unsharded parameter \"", param.fqn, "\"");
    }
    for (int state = 0; state < plan.plan().optimizer_states && flat.optimizer_offset_bytes >= 0; ++state) {
      if (holds(memory.optimizer_slab(), flat.optimizer_offset_bytes + state * flat.StateStrideBytes(),
                DTypeSizeBytes(v1::DTYPE_FLOAT32))) {
        return absl::StrCat("optimizer state of \"", param.fqn, "\"");
      }
    }
  }
  return "padding";
}

}  // namespace shardd
