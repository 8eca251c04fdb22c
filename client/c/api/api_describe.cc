// The C ABI: what is asked of an attached rank and of a spec, and answered without changing anything.

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <string>
#include <vector>

#include "client/c/api/api_internal.h"
#include "client/c/api/spec_json.h"
#include "client/c/daemon/describe.h"
#include "common/plan/largest_node.h"

namespace shardd::api {
namespace {

absl::Status JobInfo(const shardd_job* job, shardd_job_info* info) {
  SHARDD_RETURN_IF_ERROR(CheckJob("get_job_info", job));
  SHARDD_RETURN_IF_ERROR(CheckStruct("get_job_info", info));
  ClientJob& impl = *job->impl;
  Attachment& attachment = impl.attachment();
  shardd_job_info value = {};
  value.lost_nothing = impl.LostNothing() ? 1 : 0;  // first: it tells of commits
  value.rank = attachment.rank();
  value.world_size = impl.plan().world_size;
  value.group_count = static_cast<int32_t>(impl.plan().groups.size());
  value.param_count = static_cast<int32_t>(impl.plan().params.size());
  value.epoch = attachment.epoch();
  value.committed_step = attachment.committed_step();
  value.version = attachment.ledger().expected_version();
  value.created = attachment.created() ? 1 : 0;
  value.device = attachment.device().c_str();
  value.address = attachment.target().address.c_str();
  value.cuda_device = attachment.memory().device().ordinal();
  value.stream_ordered = attachment.session().stream_waits().ordered() ? 1 : 0;
  value.offloaded = IsOffloaded(attachment) ? 1 : 0;
  value.pass_copies = attachment.plan().pass_copies() ? 1 : 0;
  value.trains_more = attachment.trains_more() ? 1 : 0;
  Fill(info, value);
  return absl::OkStatus();
}

absl::Status GroupInfo(const shardd_job* job, int32_t index, shardd_group_info* info) {
  SHARDD_RETURN_IF_ERROR(CheckGroup("get_group_info", job, index));
  SHARDD_RETURN_IF_ERROR(CheckStruct("get_group_info", info));
  const GroupPlan& group = job->impl->plan().groups[static_cast<size_t>(index)];
  shardd_group_info value = {};
  value.name = group.name.c_str();
  value.param_count = static_cast<int32_t>(group.params.size());
  value.params = group.params.data();
  value.reshard_after_forward = group.reshard_after_forward ? 1 : 0;
  value.trainable = group.gradient_slot >= 0 ? 1 : 0;
  value.depth = group.depth;
  value.numel = group.numel;
  value.also_unshard_count = static_cast<int32_t>(group.also_unshards.size());
  value.also_unshards = group.also_unshards.data();
  value.post_forward_shard_size = group.post_forward_shard_size;
  Fill(info, value);
  return absl::OkStatus();
}

absl::Status ParamInfo(const shardd_job* job, int32_t index, shardd_param_info* info) {
  SHARDD_RETURN_IF_ERROR(CheckParam("get_param_info", job, index));
  SHARDD_RETURN_IF_ERROR(CheckStruct("get_param_info", info));
  const ShardPlan& plan = job->impl->plan();
  const ParamPlan& param = plan.params[static_cast<size_t>(index)];
  const std::vector<const char*>& aliases = job->aliases[static_cast<size_t>(index)];
  shardd_param_info value = {};
  value.fqn = param.fqn.c_str();
  value.alias_count = static_cast<int32_t>(aliases.size());
  value.aliases = aliases.data();
  value.ndim = static_cast<int32_t>(param.shape.size());
  value.shape = param.shape.data();
  value.numel = param.numel;
  value.dtype = static_cast<int32_t>(param.dtype);
  value.unsharded_dtype = static_cast<int32_t>(plan.flat_params[static_cast<size_t>(param.flat_param)].unsharded_dtype);
  value.requires_grad = param.requires_grad ? 1 : 0;
  value.group = param.group;
  value.index_in_group = param.index_in_group;
  value.flat_param = param.flat_param;
  value.offset_numel = param.offset;
  value.optimizer_group = param.optimizer_group;
  Fill(info, value);
  return absl::OkStatus();
}

absl::Status ShardInfo(const shardd_job* job, shardd_shard_info* info) {
  SHARDD_RETURN_IF_ERROR(CheckJob("get_shard_info", job));
  SHARDD_RETURN_IF_ERROR(CheckStruct("get_shard_info", info));
  const ShardPlan& plan = job->impl->plan();
  const Placement& placement = plan.placement;
  const auto place = static_cast<size_t>(plan.PlaceOf(job->impl->attachment().rank()));
  shardd_shard_info value = {};
  value.shard_world_size = placement.shard_world_size;
  value.shard_index = placement.shard_index[place];
  value.replicas = placement.replicas;
  value.replica_index = placement.replica_index[place];
  Fill(info, value);
  return absl::OkStatus();
}

absl::Status GetShardRange(const shardd_job* job, int32_t param, shardd_shard_range* range) {
  SHARDD_RETURN_IF_ERROR(CheckParam("get_shard_range", job, param));
  SHARDD_RETURN_IF_ERROR(CheckStruct("get_shard_range", range));
  const ShardPlan& plan = job->impl->plan();
  const int rank = job->impl->attachment().rank();
  const ParamRange own = OwnedRange(plan, Purpose::kParameters, param, rank);
  const ParamRange gradient = OwnedRange(plan, Purpose::kGradients, param, rank);
  const ParamRange optimizer = OwnedRange(plan, Purpose::kOptimizer, param, rank);
  shardd_shard_range value = {};
  value.first = own.first;
  value.numel = own.numel;
  if (plan.params[static_cast<size_t>(param)].requires_grad) {
    value.gradient_first = gradient.first;
    value.gradient_numel = gradient.numel;
    value.optimizer_first = optimizer.first;
    value.optimizer_numel = optimizer.numel;
    const ParamRange gradient_write = GradientWriteRange(plan, param, rank);
    value.gradient_write_first = gradient_write.first;
    value.gradient_write_numel = gradient_write.numel;
  }
  const ParamRange write = WriteRange(plan, param, rank);
  value.write_first = write.first;
  value.write_numel = write.numel;
  Fill(range, value);
  return absl::OkStatus();
}

absl::Status FlatParamInfo(const shardd_job* job, int32_t index, shardd_flat_param_info* info) {
  SHARDD_RETURN_IF_ERROR(CheckJob("get_flat_param_info", job));
  const std::vector<FlatParamPlan>& flat_params = job->impl->plan().flat_params;
  SHARDD_RETURN_IF_ERROR(CheckIndex("get_flat_param_info", "flat parameter", index, flat_params.size()));
  SHARDD_RETURN_IF_ERROR(CheckStruct("get_flat_param_info", info));
  const FlatParamPlan& flat_param = flat_params[static_cast<size_t>(index)];
  shardd_flat_param_info value = {};
  value.group = flat_param.group;
  value.param_count = static_cast<int32_t>(flat_param.params.size());
  value.params = flat_param.params.data();
  value.numel = flat_param.numel;
  value.padded_numel = flat_param.padded_numel;
  value.shard_numel = flat_param.shard_numel;
  Fill(info, value);
  return absl::OkStatus();
}

absl::Status ShardPieces(const shardd_job* job, int32_t flat_param, int32_t rank, shardd_shard_piece* pieces,
                         int32_t capacity, int32_t* count, int64_t* padding_numel) {
  SHARDD_RETURN_IF_ERROR(CheckJob("get_shard_pieces", job));
  SHARDD_RETURN_IF_ERROR(CheckNotNull("get_shard_pieces", "count", count));
  SHARDD_RETURN_IF_ERROR(CheckNotNull("get_shard_pieces", "padding_numel", padding_numel));
  if (capacity < 0 || (capacity > 0 && pieces == nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat("get_shard_pieces: capacity is out of range (got ", capacity,
                                                   pieces == nullptr ? ", and `pieces` is NULL, want 0)" : ")"));
  }
  const ShardPlan& plan = job->impl->plan();
  SHARDD_ASSIGN_OR_RETURN(const ShardMetadata metadata, GetShardMetadata(plan, flat_param, rank));
  *count = static_cast<int32_t>(metadata.pieces.size());
  *padding_numel = metadata.padding_numel;
  for (int32_t i = 0; i < std::min(*count, capacity); ++i) {
    const ShardMetadata::Piece& piece = metadata.pieces[static_cast<size_t>(i)];
    pieces[i] = {piece.param, piece.first, piece.numel,
                 plan.params[static_cast<size_t>(piece.param)].offset + piece.first};
  }
  return absl::OkStatus();
}

absl::Status PlanJson(const char* spec_json, char** json) {
  SHARDD_RETURN_IF_ERROR(CheckNotNull("plan_json", "json", json));
  *json = nullptr;
  SHARDD_RETURN_IF_ERROR(CheckNotForked("plan_json"));
  SHARDD_ASSIGN_OR_RETURN(const LaunchEnvironment environment, ReadLaunchEnvironment());
  SHARDD_ASSIGN_OR_RETURN(const v1::JobSpec spec, ParseSpecJson(spec_json, environment));
  SHARDD_ASSIGN_OR_RETURN(const LargestNode largest, PlanLargestNode(spec, /*on_gpus=*/false));
  const std::string text = PlanToJson(spec, largest.plan);
  *json = strdup(text.c_str());
  return *json != nullptr ? absl::OkStatus() : absl::ResourceExhaustedError("plan_json: out of memory");
}

absl::Status DescribeJob(shardd_job* job, char** json) {
  SHARDD_RETURN_IF_ERROR(CheckNotNull("describe_job", "json", json));
  *json = nullptr;
  SHARDD_RETURN_IF_ERROR(CheckJob("describe_job", job));
  const Attachment& attachment = job->impl->attachment();
  SHARDD_ASSIGN_OR_RETURN(const std::string text,
                          DescribeJobJson(attachment.target(), attachment.plan().job(), attachment.job_id(),
                                          attachment.job_secret(), attachment.timeout(), attachment.interrupt()));
  *json = strdup(text.c_str());
  return *json != nullptr ? absl::OkStatus() : absl::ResourceExhaustedError("describe_job: out of memory");
}

absl::Status DescribeDaemon(const char* address, int64_t timeout_ms, char** json) {
  SHARDD_RETURN_IF_ERROR(CheckNotNull("describe_daemon", "json", json));
  *json = nullptr;
  SHARDD_RETURN_IF_ERROR(CheckNotForked("describe_daemon"));
  SHARDD_ASSIGN_OR_RETURN(const absl::Duration timeout, TimeoutOf("describe_daemon", timeout_ms));
  InitProcess();
  SHARDD_ASSIGN_OR_RETURN(const std::string text, DescribeDaemonJson(address == nullptr ? "" : address, timeout));
  *json = strdup(text.c_str());
  return *json != nullptr ? absl::OkStatus() : absl::ResourceExhaustedError("describe_daemon: out of memory");
}

absl::Status GetCounters(const shardd_job* job, shardd_counters* counters) {
  SHARDD_RETURN_IF_ERROR(CheckJob("get_counters", job));
  SHARDD_RETURN_IF_ERROR(CheckStruct("get_counters", counters));
  ClientSession& session = job->impl->attachment().session();
  shardd_counters value = {};
  value.commands = session.ring().submitted();
  value.doorbells = session.ring().doorbells();
  value.waits = session.waits().waits();
  value.wait_ns = session.waits().wait_ns();
  Fill(counters, value);
  return absl::OkStatus();
}

}  // namespace
}  // namespace shardd::api

namespace api = shardd::api;
using api::ToC;

extern "C" {

shardd_status* shardd_get_job_info(const shardd_job* job, shardd_job_info* info) {
  return ToC(api::JobInfo(job, info));
}
shardd_status* shardd_get_group_info(const shardd_job* job, int32_t group, shardd_group_info* info) {
  return ToC(api::GroupInfo(job, group, info));
}
shardd_status* shardd_get_param_info(const shardd_job* job, int32_t param, shardd_param_info* info) {
  return ToC(api::ParamInfo(job, param, info));
}
shardd_status* shardd_get_shard_info(const shardd_job* job, shardd_shard_info* info) {
  return ToC(api::ShardInfo(job, info));
}
shardd_status* shardd_get_shard_range(const shardd_job* job, int32_t param, shardd_shard_range* range) {
  return ToC(api::GetShardRange(job, param, range));
}
shardd_status* shardd_get_flat_param_info(const shardd_job* job, int32_t flat_param, shardd_flat_param_info* info) {
  return ToC(api::FlatParamInfo(job, flat_param, info));
}
shardd_status* shardd_get_shard_pieces(const shardd_job* job, int32_t flat_param, int32_t rank,
                                       shardd_shard_piece* pieces, int32_t capacity, int32_t* count,
                                       int64_t* padding_numel) {
  return ToC(api::ShardPieces(job, flat_param, rank, pieces, capacity, count, padding_numel));
}
int32_t shardd_find_param(const shardd_job* job, const char* fqn) {
  return fqn == nullptr || !api::IsUsable(job) ? -1 : job->impl->plan().FindParam(fqn);
}
int32_t shardd_find_group(const shardd_job* job, const char* name) {
  return name == nullptr || !api::IsUsable(job) ? -1 : job->impl->plan().FindGroup(name);
}

shardd_status* shardd_plan_json(const char* spec_json, char** json) { return ToC(api::PlanJson(spec_json, json)); }
void shardd_string_free(char* text) { free(text); }
shardd_status* shardd_describe_job(shardd_job* job, char** json) { return ToC(api::DescribeJob(job, json)); }
shardd_status* shardd_describe_daemon(const char* address, int64_t timeout_ms, char** json) {
  return ToC(api::DescribeDaemon(address, timeout_ms, json));
}
shardd_status* shardd_get_counters(const shardd_job* job, shardd_counters* counters) {
  return ToC(api::GetCounters(job, counters));
}

}  // extern "C"
