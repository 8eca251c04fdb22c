#include "client/c/job/hand_ins.h"

#include "common/status/status_macros.h"

namespace shardd {

void HandIns::Reset() {
  requests_ = 0;
  requested_ = granted_ = false;
}

absl::Status HandIns::Request(const WaitFor& reason) {
  CommandRecord record = {};
  record.opcode = Opcode::kHandIn;
  SHARDD_RETURN_IF_ERROR(attachment_.Send(record, /*act=*/true, reason));
  ++requests_;
  requested_ = true;
  return absl::OkStatus();
}

absl::Status HandIns::Await(const WaitFor& reason) {
  SHARDD_RETURN_IF_ERROR(attachment_.Wait(attachment_.page().hand_ins, requests_, reason));
  requested_ = false;
  granted_ = true;
  return absl::OkStatus();
}

absl::Status HandIns::AwaitOthersLeave() {
  if (!requested_) {
    return absl::OkStatus();
  }
  SHARDD_RETURN_IF_ERROR(attachment_.Wait(attachment_.page().hand_ins, requests_,
                                          {"leave_full_params", nullptr, "all ranks outside of full parameters"}));
  requested_ = false;
  return absl::OkStatus();
}

}  // namespace shardd
