// Unshard and reshard, initial values, full parameters and writeback.

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

constexpr int64_t kUndoChunkBytes = int64_t{64} << 10;

}  // namespace

absl::Status JobCore::OnUnshard(Session* session, int group, int64_t phase) {
  const int rank = session->rank();
  if (version_ == 0) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank,
                     absl::StrCat("Unshard group \"", group_name(group), "\""),
                     "the job has no parameters yet; write them and CommitParameters first");
  }
  if (trainers_write() && ranks_[rank].pass != Pass::kInside) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank,
                     absl::StrCat("Unshard group \"", group_name(group), "\""),
                     "the rank is outside of a pass; EnterPass first");
  }
  if (phase != v1::PHASE_FORWARD && phase != v1::PHASE_BACKWARD) {
    return RankError(absl::StatusCode::kInvalidArgument, rank,
                     absl::StrCat("Unshard group \"", group_name(group), "\""),
                     absl::StrCat("unknown phase (got ", phase, ", want 1 or 2)"));
  }
  const bool forward = phase == v1::PHASE_FORWARD;
  SHARDD_RETURN_IF_ERROR(session->handles[group].Apply(
      forward ? HandleEvent::kUnshardForward : HandleEvent::kUnshardBackward, group_name(group), rank));
  counters_.set_unshards(counters_.unshards() + 1);
  const OrderEntry::Kind kind = forward ? OrderEntry::Kind::kUnshardForward : OrderEntry::Kind::kUnshardBackward;
  SHARDD_RETURN_IF_ERROR(Observe(session, {kind, group}));
  if (!pooled_) {
    // The version's word tells the client when it may read; nothing else has to happen.
    return session->handles[group].Apply(HandleEvent::kUnshardDone, group_name(group), rank);
  }
  session->CountUnshard(group);
  if (ranks_[rank].stepped || committing_) {
    auto& deferred = ranks_[rank].deferred_unshards;
    if (std::find(deferred.begin(), deferred.end(), group) == deferred.end()) {
      deferred.push_back(group);
    }
    // It asks for the version that is being made.
    return absl::OkStatus();
  }
  SHARDD_RETURN_IF_ERROR(UnshardIntoPool(rank, group));
  if (forward ? plan_->config.forward_prefetch() : plan_->config.backward_prefetch() == v1::BACKWARD_PREFETCH_PRE) {
    PrefetchNext(rank, kind);
  }
  return absl::OkStatus();
}

absl::Status JobCore::UnshardIntoPool(int rank, int group) {
  absl::StatusOr<UnshardPool::Use> use = pool_->Acquire(rank, group);
  if (!use.ok()) {
    return absl::Status(use.status().code(),
                        absl::StrCat("Unshard group \"", group_name(group), "\": ", use.status().message()));
  }
  if (use->prefetched) {
    counters_.set_prefetch_hits(counters_.prefetch_hits() + 1);
  }
  if (use->fill) {
    FillSlot(use->slot, group);
  }
  Session* session = sessions_[rank].get();
  if (use->ready) {
    session->PublishUnsharded(group, use->slot * plan_->pool_slot_bytes);
    return session->handles[group].Apply(HandleEvent::kUnshardDone, group_name(group), rank);
  }
  ranks_[rank].awaited_unshards.insert(group);
  return absl::OkStatus();
}

void JobCore::PrefetchNext(int rank, OrderEntry::Kind kind) {
  const std::optional<int32_t> next = orders_[rank].NextUnshard(kind);
  if (!next.has_value()) {
    return;
  }
  const UnshardPool::Use use = pool_->Prefetch(rank, *next);
  if (use.slot >= 0) {
    counters_.set_prefetches(counters_.prefetches() + 1);
    if (use.fill) {
      FillSlot(use.slot, *next);
    }
  }
}

void JobCore::FillSlot(int slot, int group) {
  ++pending_fills_;
  counters_.set_unshard_copies(counters_.unshard_copies() + 1);
  AllGatherRequest request;
  request.plan = plan_.get();
  request.group = group;
  request.shards = memory_->pointers().shards;
  request.destination = memory_->pool()->At<char>(slot * plan_->pool_slot_bytes);
  request.label = absl::StrCat("unshard ", group_name(group), " version ", version_);
  collective_->AllGather(std::move(request), Join(1, [this, slot, group, epoch = epoch_](const absl::Status& status) {
                           // Also when the epoch went on: until now the slot could not be given to another group.
                           const std::vector<int> waiting = pool_->Filled(slot);
                           if (epoch != epoch_ || closed_) {
                             return;
                           }
                           --pending_fills_;
                           if (!status.ok()) {
                             Abort(status, {});
                             return;
                           }
                           for (int rank : waiting) {
                             Session* session = sessions_[rank].get();
                             if (session != nullptr && ranks_[rank].awaited_unshards.erase(group) > 0) {
                               session->PublishUnsharded(group, slot * plan_->pool_slot_bytes);
                               (void)session->handles[group].Apply(HandleEvent::kUnshardDone, group_name(group), rank);
                             }
                           }
                           if (absl::Status decided = MaybeDecide(); !decided.ok()) {
                             Abort(std::move(decided), {});
                           }
                         }));
}

absl::Status JobCore::OnReshard(Session* session, int group) {
  const int rank = session->rank();
  SHARDD_RETURN_IF_ERROR(session->handles[group].Apply(HandleEvent::kReshard, group_name(group), rank));
  counters_.set_reshards(counters_.reshards() + 1);
  if (pooled_ && session->handles[group].users() == 0) {
    auto& deferred = ranks_[rank].deferred_unshards;
    if (auto it = std::find(deferred.begin(), deferred.end(), group); it != deferred.end()) {
      deferred.erase(it);
    } else {
      pool_->Release(rank, group);
      ranks_[rank].awaited_unshards.erase(group);
    }
  }
  return absl::OkStatus();
}

absl::Status JobCore::OnWriteParameters(Session* session, const RankCommand& command) {
  const int rank = session->rank();
  const bool writeback = ranks_[rank].inside && ranks_[rank].writeback;
  if (command.group < 0 || command.group >= static_cast<int>(plan_->params.size())) {
    return RankError(
        absl::StatusCode::kInvalidArgument, rank, "WriteParameters",
        absl::StrCat("no such parameter (got ", command.group, ", want 0 to ", plan_->params.size() - 1, ")"));
  }
  const ParamPlan& param = plan_->params[command.group];
  const std::string what = absl::StrCat("WriteParameters \"", param.fqn, "\"");
  if (committing_ || (version_ != 0 && !writeback)) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, what,
                     "parameters may be written before version 1 and between EnterFullParams(writeback) and "
                     "CommitParameters");
  }
  if (ranks_[rank].committed_params) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, what, "the rank has already sent CommitParameters");
  }
  if (command.arg0 < 0 || command.arg1 < 0 || command.arg0 > param.numel || command.arg1 > param.numel - command.arg0) {
    return RankError(absl::StatusCode::kInvalidArgument, rank, what,
                     absl::StrCat("elements are out of range (got ", command.arg0, " + ", command.arg1,
                                  ", want within ", param.numel, ")"));
  }
  const FlatParamPlan& flat = plan_->flat_params[param.flat_param];
  const int64_t element = DTypeSizeBytes(param.dtype);
  const int64_t size = command.arg1 * element;
  const char* source = session->Staging(command.arg2, size);
  if (source == nullptr) {
    return RankError(absl::StatusCode::kInvalidArgument, rank, what,
                     absl::StrCat("staging is out of range (got offset ", command.arg2, ", ", size, " bytes)"));
  }
  const int64_t offset = flat.shards_offset_bytes + (param.offset + command.arg0) * element;
  char* destination = memory_->shards()->At<char>(offset);
  if (version_ != 0) {
    SaveForUndo(offset, size);
  } else if (uint64_t& written_in = initial_writes_[command.group]; written_in != epoch_) {
    if (written_in != 0) {  // by an attempt that was given up: initial values are those of one attempt
      std::memset(memory_->shards()->At<char>(flat.shards_offset_bytes + param.offset * element), 0,
                  param.numel * element);
    }
    written_in = epoch_;
  }
  std::memcpy(destination, source, size);
  return absl::OkStatus();
}

// Each chunk is kept once, as it was before the first write: never more than the shards themselves.
void JobCore::SaveForUndo(int64_t offset_bytes, int64_t size_bytes) {
  for (int64_t chunk = offset_bytes / kUndoChunkBytes; chunk * kUndoChunkBytes < offset_bytes + size_bytes; ++chunk) {
    const int64_t begin = chunk * kUndoChunkBytes;
    const int64_t size = std::min(kUndoChunkBytes, memory_->shards()->size_bytes() - begin);
    if (auto [it, added] = undo_.try_emplace(chunk); added) {
      it->second.assign(memory_->shards()->At<char>(begin), size);
    }
  }
}

void JobCore::UndoWrites() {
  for (const auto& [chunk, bytes] : undo_) {
    std::memcpy(memory_->shards()->At<char>(chunk * kUndoChunkBytes), bytes.data(), bytes.size());
  }
  undo_.clear();
}

absl::Status JobCore::OnCommitParameters(Session* session) {
  const int rank = session->rank();
  const bool writeback = ranks_[rank].inside && ranks_[rank].writeback;
  if (committing_ || (version_ != 0 && !writeback) || ranks_[rank].committed_params) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "CommitParameters",
                     ranks_[rank].committed_params
                         ? "the rank has already sent it"
                         : "legal before version 1 and between EnterFullParams(writeback) and LeaveFullParams");
  }
  SHARDD_RETURN_IF_ERROR(CheckNobodyFinished(rank, "CommitParameters"));
  ranks_[rank].committed_params = true;
  if (!std::all_of(ranks_.begin(), ranks_.end(), [](const RankStep& r) { return r.committed_params; })) {
    return absl::OkStatus();
  }
  if (version_ == 0) {
    for (const auto& [index, written_in] : initial_writes_) {
      const ParamPlan& param = plan_->params[index];
      const FlatParamPlan& flat = plan_->flat_params[param.flat_param];
      const int64_t element = DTypeSizeBytes(param.dtype);
      if (written_in != epoch_) {
        std::memset(memory_->shards()->At<char>(flat.shards_offset_bytes + param.offset * element), 0,
                    param.numel * element);
      }
    }
    initial_writes_.clear();
  }
  committing_ = true;
  undo_.clear();  // from here on it completes forward
  auto done = Join(world_size(), [this](const absl::Status& status) {
    if (!status.ok()) {
      LogError(absl::StrCat("job ", name(), ": commit of parameters: ", status.message()));
      committing_ = false;
      Close(absl::StrCat("commit of parameters: ", status.message()));
      return;
    }
    FinishParametersCommit();
  });
  for (int r = 0; r < world_size(); ++r) {
    DeviceWork work;
    work.label = absl::StrCat("cast version ", version_ + 1);
    work.ops = CastOps(*plan_, memory_->pointers(), r);
    work.done = done;
    devices_[r]->Submit(StreamId::kOptimizer, std::move(work));
  }
  return absl::OkStatus();
}

void JobCore::FinishParametersCommit() {
  committing_ = false;
  if (closed_) {
    return;
  }
  ++version_;
  for (RankStep& rank : ranks_) {
    rank.committed_params = false;
    rank.writeback = false;
  }
  if (pool_ != nullptr) {
    pool_->Invalidate();
  }
  if (absl::Status status = journal_->WriteHeader({epoch_, committed_step_, version_}); !status.ok()) {
    LogError(absl::StrCat("job ", name(), ": ", status.message()));
  }
  Event(-1, "parameters", absl::StrCat("version ", version_));
  AfterCommit();
}

absl::Status JobCore::OnEnterFullParams(Session* session, bool writeback) {
  const int rank = session->rank();
  if (version_ == 0 || ranks_[rank].full_params) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "EnterFullParams",
                     version_ == 0 ? "the job has no parameters yet" : "the rank is inside already");
  }
  SHARDD_RETURN_IF_ERROR(CheckNobodyFinished(rank, "EnterFullParams"));
  if (window_open_ || ranks_[rank].wants_window || ranks_[rank].pass != Pass::kOutside) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "EnterFullParams",
                     "a pass or a write window is open; EnterPass and LeavePass first");
  }
  for (size_t g = 0; g < session->handles.size(); ++g) {
    SHARDD_RETURN_IF_ERROR(
        session->handles[g].Apply(HandleEvent::kEnterFullParams, group_name(static_cast<int>(g)), rank));
  }
  for (int other = 0; other < world_size(); ++other) {
    if (ranks_[other].full_params && !ranks_[other].inside && ranks_[other].writeback != writeback) {
      return RankError(absl::StatusCode::kFailedPrecondition, rank, "EnterFullParams",
                       absl::StrCat("writeback differs between ranks (got ", writeback, " on rank ", rank, ", ",
                                    ranks_[other].writeback, " on rank ", other, ")"));
    }
  }
  if (writeback) {  // there was memory for the old bytes when the job opened; processes beside the daemon may have it
                    // now
    SHARDD_ASSIGN_OR_RETURN(const MemoryLimits limits, GetMemoryLimits(memory_->directory()));
    if (absl::Status status = CheckMemory(limits, 0, plan_->memory.shards_bytes); !status.ok()) {
      return RankError(status.code(), rank, "EnterFullParams with writeback", status.message());
    }
  }
  ranks_[rank].full_params = true;
  ranks_[rank].writeback = writeback;
  MaybeGrantFullParams();
  return absl::OkStatus();
}

void JobCore::MaybeGrantFullParams() {
  const bool all =
      std::all_of(ranks_.begin(), ranks_.end(), [](const RankStep& r) { return r.full_params && !r.stepped; });
  if (!all || full_params_granted_ || committing_ || closed_) {
    return;
  }
  full_params_granted_ = true;
  Event(-1, "full_params", ranks_[0].writeback ? "entered with writeback" : "entered");
  for (int rank = 0; rank < world_size(); ++rank) {
    ranks_[rank].inside = true;
    sessions_[rank]->PublishFullParams();
  }
}

absl::Status JobCore::OnLeaveFullParams(Session* session) {
  const int rank = session->rank();
  if (!ranks_[rank].inside) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "LeaveFullParams", "the rank is not inside");
  }
  for (size_t g = 0; g < session->handles.size(); ++g) {
    SHARDD_RETURN_IF_ERROR(
        session->handles[g].Apply(HandleEvent::kLeaveFullParams, group_name(static_cast<int>(g)), rank));
  }
  if (committing_) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "LeaveFullParams", "the commit is not finished");
  }
  ranks_[rank].full_params = false;
  ranks_[rank].inside = false;
  ranks_[rank].writeback = false;
  ranks_[rank].committed_params = false;
  if (std::none_of(ranks_.begin(), ranks_.end(), [](const RankStep& r) { return r.inside; })) {
    full_params_granted_ = false;
    UndoWrites();            // writes that nobody committed
    MaybeGrantFullParams();  // somebody may wait for the next time already
  }
  return absl::OkStatus();
}

}  // namespace shardd
