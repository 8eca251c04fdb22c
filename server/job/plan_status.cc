// What an operator sees of a plan. Pure.

#include <cstdint>

#include "server/job/job_core.h"

namespace shardd {
namespace {

constexpr int64_t kMaxShardRanges = int64_t{1} << 20;

}  // namespace

void JobDescription::Complete(v1::Job* out) const {
  int64_t numel = 0;
  for (const ParamPlan& param : plan->params) {
    numel += param.numel;
  }
  out->set_parameters_numel(numel);
  *out->mutable_config() = plan->config;
  if (std::any_of(step_counts->begin(), step_counts->end(), [](int64_t count) { return count > 0; })) {
    out->mutable_update_counts()->Add(step_counts->begin(), step_counts->end());
  }
}

void DescribeGroups(const ShardPlan& plan, v1::ListGroupsResponse* out) {
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    const GroupPlan& of = plan.groups[g];
    v1::Group* group = out->add_groups();
    group->set_index(static_cast<int>(g));
    group->set_name(of.name);
    group->set_parameters(static_cast<int>(of.params.size()));
    group->set_numel(of.numel);
    group->set_depth(of.depth);
    group->set_reshard_after_forward(of.reshard_after_forward);
    group->set_gradient_slot(of.gradient_slot);
    int64_t padded = 0;
    for (int f : of.flat_params) {
      const FlatParamPlan& flat = plan.flat_params[f];
      v1::FlatParam* out_flat = group->add_flat_params();
      out_flat->set_dtype(flat.dtype);
      out_flat->set_requires_grad(flat.requires_grad);
      out_flat->set_numel(flat.numel);
      out_flat->set_padded_numel(flat.padded_numel);
      out_flat->set_shard_numel(flat.shard_numel);
      out_flat->set_unsharded_dtype(flat.unsharded_dtype);
      padded += flat.padded_numel;
    }
    group->set_padded_numel(padded);
    if (of.mixed_precision.ByteSizeLong() > 0) *group->mutable_mixed_precision() = of.mixed_precision;
    for (int other : of.also_unshards) {
      group->add_also_unshards(plan.groups[other].name);
    }
  }
}

void DescribeParameters(const ShardPlan& plan, v1::ListParametersResponse* out) {
  // Sizes are the client's choice; an answer of gigabytes is not.
  const bool with_shards = static_cast<int64_t>(plan.params.size()) * plan.world_size <= kMaxShardRanges;
  for (const ParamPlan& of : plan.params) {
    v1::ParameterInfo* info = out->add_parameters();
    info->set_fqn(of.fqn);
    info->mutable_aliases()->Assign(of.aliases.begin(), of.aliases.end());
    info->mutable_shape()->Assign(of.shape.begin(), of.shape.end());
    info->set_dtype(of.dtype);
    info->set_requires_grad(of.requires_grad);
    info->set_group(plan.groups[of.group].name);
    info->set_flat_param(of.flat_param);
    info->set_offset_numel(of.offset);
    info->set_optimizer_group(of.optimizer_group);
    for (int rank = 0; with_shards && rank < plan.world_size; ++rank) {
      info->add_shards();
    }
  }
  if (!with_shards) {
    return;
  }
  for (size_t f = 0; f < plan.flat_params.size(); ++f) {
    for (int rank = 0; rank < plan.world_size; ++rank) {
      for (const Segment& segment : RankSegments(plan, static_cast<int>(f), rank)) {
        v1::ShardRange* range = out->mutable_parameters(segment.param)->mutable_shards(rank);
        range->set_first(segment.offset - plan.params[segment.param].offset);
        range->set_numel(segment.numel);
      }
    }
  }
}

void DescribeTraced(const ShardPlan& plan, v1::TraceStart* out) {
  for (const GroupPlan& group : plan.groups) {
    v1::TraceStart::Group* to = out->add_groups();
    to->set_name(group.name);
    to->set_unsharded_bytes(group.unsharded_bytes);
    to->set_gradient_bytes(group.gradient_bytes);
    to->set_gradient_slot(group.gradient_slot);
  }
}

}  // namespace shardd
