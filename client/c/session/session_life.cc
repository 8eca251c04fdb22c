#include "client/c/session/session_life.h"

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

// The epoch word is faster than the event that explains it.
constexpr absl::Duration kExplanationGrace = absl::Seconds(1);

// The daemon has just given this session out: when it does not know it any more, an epoch has passed in between.
absl::Status EndedWhileAttaching(const absl::Status& status) {
  return absl::IsUnauthenticated(status) || absl::IsPermissionDenied(status)
             ? absl::AbortedError(absl::StrCat("attach: the session ended before it was live: ", status.message()))
             : status;
}

}  // namespace

absl::Status SessionLife::Open(const std::shared_ptr<grpc::Channel>& channel, uint64_t session_id,
                               const std::string& token, Deadline deadline, bool outlives_daemon) {
  SHARDD_ASSIGN_OR_RETURN(stream_, ClientStream::Open(channel, session_id, token, outlives_daemon));
  return EndedWhileAttaching(stream_->WaitAttached(deadline, interrupt_));
}

absl::Status SessionLife::Explain(const absl::Status& status) {
  const absl::Status ended = stream_->EndStatus(Deadline::In(kExplanationGrace), interrupt_);
  return EndedWhileAttaching(ended.ok() ? status : ended);
}

absl::Status SessionLife::Failure() {
  if (order_ != nullptr && order_->has_expired()) {
    stream_->Close();  // the others are told at once
    return order_->expired();
  }
  absl::Status status = stream_->EndStatus(Deadline::In(kExplanationGrace), interrupt());
  if (!status.ok()) {
    return status;
  }
  return absl::AbortedError(absl::StrCat("session: the epoch advanced (got ",
                                         TimelineEpoch(memory_.page().epoch.load(std::memory_order_acquire)), ", want ",
                                         epoch_, "; rank=", rank_, "); call shardd_reattach"));
}

}  // namespace shardd
