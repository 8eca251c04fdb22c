// What a trainer that looks at shards directly needs: where they lie, and when they may be looked at.

#include "client/c/client_job.h"
#include "common/status/status_macros.h"

namespace shardd {

const void* ClientJob::StoredParameterData(int index) const {
  if (session_ == nullptr) {
    return nullptr;
  }
  const ParamPlan& param = this->param(index);
  const FlatParamPlan& flat = flat_of(param);
  return session_->shards() + flat.shards_offset_bytes + param.offset * DTypeSizeBytes(flat.dtype);
}

void* ClientJob::GradientShardData(int index) const {
  const ParamPlan& param = this->param(index);
  const FlatParamPlan& flat = flat_of(param);
  if (session_ == nullptr || session_->gradients() == nullptr || flat.gradients_offset_bytes < 0) {
    return nullptr;
  }
  return session_->gradients() + flat.gradients_offset_bytes + param.offset * DTypeSizeBytes(v1::DTYPE_FLOAT32);
}

absl::Status ClientJob::WaitGradients() {
  SHARDD_RETURN_IF_ERROR(Live());
  const WaitFor reason{"wait_gradients", nullptr, "the reduction of the backwards closed so far"};
  return Note(session_->Wait(session_->daemon_page().page().reduced, progress_.backwards_closed, reason));
}

}  // namespace shardd
