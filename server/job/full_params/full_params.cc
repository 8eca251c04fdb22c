#include "server/job/full_params/full_params.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/shm/ring.h"

namespace shardd {

FullParamsRequest ParseFullParams(uint32_t flags, int group) {
  FullParamsRequest request;
  request.writeback = (flags & kWriteback) != 0;
  request.rank0_only = (flags & kRank0Only) != 0;
  request.with_grads = (flags & kWithGrads) != 0;
  request.recurse = (flags & kNotRecurse) == 0;
  request.of_edits = (flags & kEdits) != 0;
  request.group = group;
  return request;
}

absl::Status CheckFullParams(const ShardPlan& plan, const FullParamsRequest& request, bool over_nodes) {
  const int groups = static_cast<int>(plan.groups.size());
  if (request.group < -1 || request.group >= groups || (request.group < 0 && !request.recurse)) {
    return absl::InvalidArgumentError(
        request.group == -1 ? "recurse false names no module; name a group"
                            : absl::StrCat("no such group (got ", request.group, ", want -1 to ", groups - 1, ")"));
  }
  if (request.with_grads && plan.memory.gradients_bytes == 0) {
    return absl::FailedPreconditionError("with_grads: no parameter of the job is trained");
  }
  const bool all_write = request.writeback && !request.rank0_only && !request.with_grads && request.group == -1;
  if (request.of_edits && (!all_write || !plan.writes_edits_back())) {
    return absl::FailedPreconditionError(
        "of_edits: edits are written back by all ranks, of the whole model, over several nodes alone (got another "
        "request, or a job that does not); HandIn");
  }
  if (plan.cut_over_nodes && !request.writeback) {  // with it ranks write, and read nothing here
    return absl::UnimplementedError(
        "full parameters are not served where they are cut over nodes; read shards, or use "
        "STRATEGY_HYBRID_SHARD with shard groups within a node");
  }
  if (request.writeback && request.with_grads && over_nodes) {
    return absl::UnimplementedError("writeback of gradients is not served on several nodes; leave out with_grads");
  }
  return absl::OkStatus();
}

const FullParamsRequest* FullParams::agreed() const {
  const auto first = std::find_if(ranks_.begin(), ranks_.end(), [](const OfRank& rank) { return rank.asked; });
  return first == ranks_.end() ? nullptr : &first->request;
}

bool FullParams::AnyInside() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const OfRank& rank) { return rank.inside; });
}

bool FullParams::AnyWrites() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const OfRank& rank) { return rank.writes; });
}

absl::Status FullParams::CheckEqual(int rank, const FullParamsRequest& request) const {
  for (size_t other = 0; other < ranks_.size(); ++other) {
    if (!ranks_[other].asked || ranks_[other].inside) {
      continue;
    }
    const FullParamsRequest& before = ranks_[other].request;
    const struct {
      const char* name;
      int got;
      int want;
    } fields[] = {{"writeback", request.writeback, before.writeback},
                  {"rank0_only", request.rank0_only, before.rank0_only},
                  {"with_grads", request.with_grads, before.with_grads},
                  {"recurse", request.recurse, before.recurse},
                  {"group", request.group, before.group},
                  {"of_edits", request.of_edits, before.of_edits}};
    for (const auto& field : fields) {
      if (field.got != field.want) {
        return absl::FailedPreconditionError(absl::StrCat(field.name, " differs between ranks (got ", field.got,
                                                          " on rank ", rank, ", ", field.want, " on rank ", other,
                                                          ")"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status FullParams::CheckMayWrite(const ShardPlan& plan, int rank, int param) const {
  const FullParamsRequest& request = ranks_[rank].request;
  if (!params_[param]) {
    return absl::FailedPreconditionError(
        absl::StrCat("not among the parameters of group \"", plan.groups[request.group].name, "\" that were entered"));
  }
  if (request.rank0_only && rank != 0) {
    return absl::FailedPreconditionError("rank 0 alone writes (rank0_only)");
  }
  return absl::OkStatus();
}

void FullParams::Ask(int rank, const FullParamsRequest& request, uint64_t signal) {
  OfRank& of = ranks_[rank];
  of.asked = true;
  of.request = request;
  of.writes = request.writeback;
  of.entry_signal = signal;
}

void FullParams::Refuse() {
  for (OfRank& rank : ranks_) {
    rank.asked = rank.writes = false;
  }
}

void FullParams::Grant(std::vector<bool> params) {
  granted_ = true;
  params_ = std::move(params);
  for (OfRank& rank : ranks_) {
    rank.inside = rank.asked;
  }
}

void FullParams::WritesCommitted() {
  for (OfRank& rank : ranks_) {
    rank.writes = false;
  }
}

bool FullParams::Leave(int rank, uint64_t signal) {
  OfRank& of = ranks_[rank];
  of.asked = of.inside = of.writes = false;
  of.leave_signal = signal;
  if (AnyInside()) {
    return false;
  }
  granted_ = false;
  return true;
}

void FullParams::LeaveSignalsCame() {
  for (OfRank& rank : ranks_) {
    rank.leave_signal = 0;
  }
}

void FullParams::EndEpoch() {
  ranks_.assign(ranks_.size(), OfRank());
  granted_ = awaits_devices_ = false;
}

}  // namespace shardd
