#include "tests/fuzz/spec_input.h"

#include <vector>

#include "common/plan/plan.h"
#include "tests/fuzz/require.h"

namespace shardd::fuzz {
namespace {

// Beyond it the walk over all elements would take too long; everything else is still checked.
constexpr int64_t kMostElements = 1 << 16;

void CheckFlatParam(const ShardPlan& plan, int index) {
  const FlatParamPlan& flat = plan.flat_params[index];
  REQUIRE(flat.numel >= 0 && flat.padded_numel >= flat.numel && flat.shard_numel >= 0);
  const auto fits = [](int copies, int64_t stride_bytes, int64_t offset_bytes, int64_t size_bytes, int64_t slab_bytes) {
    return copies >= 1 && stride_bytes >= 0 && offset_bytes >= 0 && offset_bytes + size_bytes <= stride_bytes &&
           (copies - 1) * stride_bytes + offset_bytes + size_bytes <= slab_bytes;
  };
  REQUIRE(fits(plan.shard_copies, plan.shards_stride_bytes, flat.shards_offset_bytes,
               flat.padded_numel * DTypeSizeBytes(flat.dtype), plan.memory.shards_bytes));
  if (flat.gradients_offset_bytes >= 0) {
    REQUIRE(fits(plan.gradient_copies, plan.gradients_stride_bytes, flat.gradients_offset_bytes,
                 flat.padded_numel * DTypeSizeBytes(v1::DTYPE_FLOAT32), plan.memory.gradients_bytes));
  }
  if (flat.optimizer_offset_bytes >= 0) {
    REQUIRE(fits(plan.optimizer_copies, plan.optimizer_stride_bytes, flat.optimizer_offset_bytes,
                 plan.optimizer_states * flat.StateStrideBytes(), plan.memory.optimizer_bytes));
  }
  if (flat.padded_numel > kMostElements || plan.world_size > 16) return;
  std::vector<int> owners(flat.padded_numel, 0);
  for (int rank = 0; rank < plan.world_size; ++rank) {
    for (const Segment& segment : WorkSegments(plan, index, rank)) {
      REQUIRE(segment.numel > 0 && segment.offset >= 0 && segment.offset + segment.numel <= flat.padded_numel);
      for (int64_t i = 0; i < segment.numel; ++i) ++owners[segment.offset + i];
    }
  }
  int64_t owned = 0;
  for (const int count : owners) {
    REQUIRE(count <= 1);
    owned += count;
  }
  int64_t wanted = 0;
  for (const int param : flat.params) wanted += plan.params[param].numel;
  REQUIRE(owned == wanted);
}

}  // namespace

bool CheckPlanOf(const v1::JobSpec& spec) {
  const absl::StatusOr<ShardPlan> plan = PlanShards(spec);
  const absl::StatusOr<ShardPlan> again = PlanShards(spec);
  REQUIRE(plan.status() == again.status());
  if (!plan.ok()) {
    REQUIRE(!plan.status().message().empty());
    return false;
  }
  REQUIRE(plan->digest.size() == 32 && plan->digest == again->digest);
  REQUIRE(FirstDifference(spec, spec).empty());
  REQUIRE(plan->memory.TotalBytes(plan->world_size) > 0);
  for (size_t p = 0; p < plan->params.size(); ++p) {
    const ParamPlan& param = plan->params[p];
    REQUIRE(plan->FindParam(param.fqn) == static_cast<int>(p));
    REQUIRE(param.offset >= 0 && param.offset + param.numel <= plan->flat_params[param.flat_param].numel);
  }
  for (size_t f = 0; f < plan->flat_params.size(); ++f) CheckFlatParam(*plan, static_cast<int>(f));
  return true;
}

}  // namespace shardd::fuzz
