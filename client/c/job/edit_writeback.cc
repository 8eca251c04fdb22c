#include "client/c/job/edit_writeback.h"

#include "common/status/status_macros.h"

namespace shardd {

absl::Status EditWriteback::Run() {
  if (next_ == Next::kNone || next_ == Next::kEnter) {
    next_ = Next::kEnter;
    FullParamsOptions options;
    options.writeback = options.of_edits = true;
    if (!full_params_.written_back()) SHARDD_RETURN_IF_ERROR(full_params_.EnterWithin(options));
    // Before the commit, which takes stores that are still there for new ones. Should the commit fail, so has the
    // epoch.
    SHARDD_RETURN_IF_ERROR(edits_.WriteBack([this](int param, const void* data, int64_t first, int64_t numel) {
      return values_.WriteWithin(param, data, first, numel);
    }));
    next_ = Next::kCommit;
  }
  if (next_ == Next::kCommit) {
    SHARDD_RETURN_IF_ERROR(values_.CommitWithin());
    next_ = Next::kLeave;
  }
  SHARDD_RETURN_IF_ERROR(full_params_.LeaveWithin());
  next_ = Next::kNone;
  return absl::OkStatus();
}

}  // namespace shardd
