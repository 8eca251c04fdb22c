// Values from trainers: initial ones, writeback of full parameters, and their commit.

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
  if (writeback) {
    SHARDD_RETURN_IF_ERROR(CheckSummoned(rank, command.group, what));
  }
  if (command.arg0 < 0 || command.arg1 < 0 || command.arg0 > param.numel || command.arg1 > param.numel - command.arg0) {
    return RankError(absl::StatusCode::kInvalidArgument, rank, what,
                     absl::StrCat("elements are out of range (got ", command.arg0, " + ", command.arg1,
                                  ", want within ", param.numel, ")"));
  }
  const FlatParamPlan& flat = plan_->flat_params[param.flat_param];
  const bool of_gradient = (command.flags & kOfGradient) != 0;
  if (of_gradient && !(writeback && ranks_[rank].full.with_grads && param.requires_grad)) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, what,
                     param.requires_grad ? "gradients may be written after EnterFullParams(writeback, with_grads)"
                                         : "a frozen parameter has no gradient");
  }
  const int64_t element = of_gradient ? sizeof(float) : DTypeSizeBytes(param.dtype);
  const int64_t size = command.arg1 * element;
  const char* source = session->Staging(command.arg2, size);
  if (source == nullptr) {
    return RankError(absl::StatusCode::kInvalidArgument, rank, what,
                     absl::StrCat("staging is out of range (got offset ", command.arg2, ", ", size, " bytes)"));
  }
  if (of_gradient) {
    for (int copy = 0; copy < plan_->gradient_copies; ++copy) {
      char* const gradient = memory_->pointers().gradients + copy * plan_->gradients_stride_bytes +
                             flat.gradients_offset_bytes + param.offset * element;
      if (!present_[command.group]) {  // what lies there is of no step
        std::memset(gradient, 0, param.numel * element);
      }
      std::memcpy(gradient + command.arg0 * element, source, size);
    }
    present_[command.group] = true;
    return absl::OkStatus();
  }
  const int64_t offset = flat.shards_offset_bytes + (param.offset + command.arg0) * element;
  if (version_ == 0) {
    uint64_t& written_in = initial_writes_[command.group];
    if (written_in != epoch_ && written_in != 0) {  // by an attempt that was given up: initial values are one's
      ClearParameter(command.group);
    }
    written_in = epoch_;
  }
  for (int copy = 0; copy < plan_->shard_copies; ++copy) {
    const int64_t place = offset + copy * plan_->shards_stride_bytes;
    if (version_ != 0) {
      SaveForUndo(place, size);
    }
    std::memcpy(memory_->shards()->At<char>(place), source, size);
  }
  return absl::OkStatus();
}

void JobCore::ClearParameter(int index) {
  const ParamPlan& param = plan_->params[index];
  const FlatParamPlan& flat = plan_->flat_params[param.flat_param];
  const int64_t element = DTypeSizeBytes(param.dtype);
  for (int copy = 0; copy < plan_->shard_copies; ++copy) {
    std::memset(memory_->shards()->At<char>(copy * plan_->shards_stride_bytes + flat.shards_offset_bytes +
                                            param.offset * element),
                0, param.numel * element);
  }
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
      if (written_in != epoch_) {
        ClearParameter(index);
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

}  // namespace shardd
