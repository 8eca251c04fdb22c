// What a trainer that looks at shards directly needs: where they lie, and when they may be looked at.

#include <sys/mman.h>

#include "absl/strings/str_cat.h"
#include "client/c/call_span.h"
#include "client/c/client_job.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr int64_t kLeastGivenBackBytes = int64_t{1} << 17;  // less is not worth the calls

}  // namespace

const void* ClientJob::StoredParameterData(int index) const { return StoredAt(index, copy_of(plan_.shard_copies)); }

void* ClientJob::GradientShardData(int index) const { return GradientAt(index, copy_of(plan_.gradient_copies)); }

const char* ClientJob::StoredAt(int index, int64_t copy) const {
  if (session_ == nullptr) {
    return nullptr;
  }
  const ParamPlan& param = this->param(index);
  const FlatParamPlan& flat = flat_of(param);
  return session_->shards() + copy * plan_.shards_stride_bytes + flat.shards_offset_bytes +
         param.offset * DTypeSizeBytes(flat.dtype);
}

char* ClientJob::GradientAt(int index, int64_t copy) const {
  const ParamPlan& param = this->param(index);
  const FlatParamPlan& flat = flat_of(param);
  if (session_ == nullptr || session_->gradients() == nullptr || flat.gradients_offset_bytes < 0) {
    return nullptr;
  }
  return session_->gradients() + copy * plan_.gradients_stride_bytes + flat.gradients_offset_bytes +
         param.offset * DTypeSizeBytes(v1::DTYPE_FLOAT32);
}

absl::Status ClientJob::WaitGradients() {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_WAIT_GRADIENTS);
  SHARDD_RETURN_IF_ERROR(Live());
  const WaitFor reason{"wait_gradients", nullptr, "the reduction of the backwards closed so far"};
  const DaemonPage& page = session_->daemon_page().page();
  if (session_->stream_ordered()) {
    SHARDD_RETURN_IF_ERROR(Note(session_->Wait(page.reducing, progress_.backwards_closed, reason)));
  }
  return span.Of(Note(session_->WaitInStream(page.reduced, progress_.backwards_closed, reason)));
}

absl::Status ClientJob::GiveBackGradient(int index) {
  SHARDD_RETURN_IF_ERROR(Live());
  const ParamPlan& param = this->param(index);
  const auto refuse = [&](const char* fact) {
    return absl::FailedPreconditionError(
        absl::StrCat("give_back_gradient \"", param.fqn, "\": ", fact, " (rank=", rank(), ")"));
  };
  if (progress_.has_gradients) {
    return refuse("the running step has gradients; give them back between a step and the next backward");
  }
  if (progress_.full_params != FullParams::kOutside) {
    return refuse("full parameters are entered; call shardd_leave_full_params first");
  }
  // Rows that several ranks hold are not this one's to drop, and a GPU's memory stays where it is.
  if (GradientAt(index, 0) == nullptr || session_->on_device() ||
      plan_.placement.pieces(Purpose::kGradients) < plan_.world_size) {
    return absl::OkStatus();
  }
  SHARDD_RETURN_IF_ERROR(WaitCommitted("give_back_gradient", &param.fqn));
  const ParamRange range = OwnedRange(plan_, Purpose::kGradients, index, rank());
  constexpr auto kElementBytes = static_cast<int64_t>(sizeof(float));
  char* const gradient = GradientAt(index, 0);
  const auto begin = reinterpret_cast<uintptr_t>(gradient + range.first * kElementBytes);
  const auto first = (begin + kPageBytes - 1) / kPageBytes * kPageBytes;
  const auto end = (begin + static_cast<uintptr_t>(range.numel * kElementBytes)) / kPageBytes * kPageBytes;
  if (range.numel * kElementBytes < kLeastGivenBackBytes || first >= end) {
    return absl::OkStatus();
  }
  // A kernel that cannot keeps them: nothing else changes.
  (void)madvise(reinterpret_cast<void*>(first), end - first, MADV_REMOVE);
  return absl::OkStatus();
}

absl::Status ClientJob::SetGradientPresence(int index, bool present) {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_SET_GRADIENT_PRESENCE, param(index).group);
  SHARDD_RETURN_IF_ERROR(Live());
  const ParamPlan& param = this->param(index);
  const auto refuse = [&](const char* fact, const char* remedy) {
    return absl::FailedPreconditionError(
        absl::StrCat("set_gradient_presence \"", param.fqn, "\": ", fact, " (rank=", rank(), ")", remedy));
  };
  if (!param.requires_grad) {
    return refuse("the parameter is frozen", "");
  }
  if (progress_.backward_open) {
    return refuse("gradients were submitted in a backward that is not closed", "; call shardd_backward_done first");
  }
  if (progress_.entering_pass) {  // what it enters may be committing the step by now
    return refuse("the rank is entering a pass", "; call shardd_enter_pass again until it is inside");
  }
  if (progress_.full_params != FullParams::kOutside) {
    return refuse("full parameters are entered", "; call shardd_leave_full_params first");
  }
  SHARDD_RETURN_IF_ERROR(WaitCommitted("set_gradient_presence", &param.fqn));
  progress_.has_gradients = progress_.has_gradients || present;
  CommandRecord record = {};
  record.opcode = Opcode::kSetGradientPresence;
  record.group = index;
  record.arg0 = present ? 1 : 0;
  return span.Of(
      Note(session_->Send(record, /*act=*/false, {"set_gradient_presence", &param.fqn, "space in the ring"})));
}

}  // namespace shardd
