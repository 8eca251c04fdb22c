#include "server/job/writes/parameter_parts.h"

#include <algorithm>

#include "common/plan/node_part.h"
#include "common/plan/whole_params.h"
#include "common/status/status_macros.h"
#include "common/tensor/dtype.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"

namespace shardd {

absl::Status SlabPart::ClearSome() {
  constexpr int64_t kPieceBytes = int64_t{4} << 20;  // memory that arrives with the first store takes a millisecond
  const int64_t count = std::min(numel, kPieceBytes / element_bytes);
  SHARDD_RETURN_IF_ERROR(slab->Zero(offset_bytes, count * element_bytes));
  offset_bytes += count * element_bytes;
  numel -= count;
  return absl::OkStatus();
}

SlabPart WholePart(const ShardPlan& plan, const JobMemory& memory, int param, int part) {
  const ParamPlan& of = plan.params[param];
  const FlatParamPlan& flat = plan.flat_params[of.flat_param];
  if (part == 0) {
    const int64_t element_bytes = DTypeSizeBytes(of.dtype);
    return {memory.shards(), flat.shards_offset_bytes + of.offset * element_bytes, element_bytes, of.numel};
  }
  const bool updates = plan.config.optimizer().kind() != v1::OPTIMIZER_KIND_TRAINER;
  if (!updates || !of.requires_grad || flat.optimizer_offset_bytes < 0 || part < 0 || part > flat.optimizer_states) {
    return {};
  }
  const int64_t element_bytes = DTypeSizeBytes(v1::DTYPE_FLOAT32);
  return {memory.optimizer(),
          flat.optimizer_offset_bytes + (part - 1) * flat.StateStrideBytes() + of.offset * element_bytes, element_bytes,
          StateNumel(plan, param, part - 1)};
}

ParamRange ElementsOfNode(const ShardPlan& plan, int param) {
  if (!plan.cut_over_nodes) {
    return {0, plan.params[param].numel};
  }
  return NodeRangeOf(plan, param, plan.node);
}

SlabPart PartOfNode(const ShardPlan& plan, const JobMemory& memory, int param, int part) {
  SlabPart result = WholePart(plan, memory, param, part);
  const ParamRange elements = ElementsOfNode(plan, param);
  result.offset_bytes += elements.first * result.element_bytes;
  result.numel = std::max<int64_t>(0, std::min(elements.numel, result.numel - elements.first));
  return result;
}

}  // namespace shardd
