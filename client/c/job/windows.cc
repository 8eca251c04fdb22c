#include "client/c/job/windows.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"

namespace shardd {

void Windows::Reset() {
  requests_ = 0;
  requested_ = open_ = false;
}

absl::Status Windows::Request(const WaitFor& reason) {
  CommandRecord record = {};
  record.opcode = Opcode::kOpenWindow;
  SHARDD_RETURN_IF_ERROR(attachment_.Send(record, /*act=*/true, reason));
  ++requests_;
  requested_ = true;
  return absl::OkStatus();
}

absl::Status Windows::Open(const WaitFor& reason) {
  SHARDD_RETURN_IF_ERROR(attachment_.Wait(attachment_.page().windows, requests_, reason));
  requested_ = false;
  open_ = true;
  return attachment_.memory().SetShardsWritable(true)
             ? absl::OkStatus()
             : absl::InternalError(absl::StrCat("open_window job \"", attachment_.plan().job(),
                                                "\": mprotect (rank=", attachment_.rank(), ")"));
}

absl::Status Windows::AwaitOthersLeave() {
  if (!requested_) {
    return absl::OkStatus();
  }
  SHARDD_RETURN_IF_ERROR(attachment_.Wait(attachment_.page().windows, requests_,
                                          {"leave_full_params", nullptr, "all ranks outside of full parameters"}));
  requested_ = false;
  return absl::OkStatus();
}

void Windows::Close() {
  if (std::exchange(open_, false)) {
    (void)attachment_.memory().SetShardsWritable(false);
  }
}

}  // namespace shardd
