// How values from trainers (writes/value_writes.h) become a version.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"
#include "server/observe/log.h"

namespace shardd {
absl::Status JobCore::OnLeaveFullParams(Session* session, uint64_t done) {
  bool last = false;
  SHARDD_RETURN_IF_ERROR(summons_.Leave(session, done, &last));
  values_.Forget(session->rank());
  if (last) {
    values_.Undo();  // writes that nobody committed
  }
  return absl::OkStatus();
}

absl::Status JobCore::BeginValuesCommit() {
  if (nodes_ != nullptr) {
    values_.BeginSaying();
    SayValues();  // CommitValues comes when all nodes have the same
    return absl::OkStatus();
  }
  return CommitValues();
}

absl::Status JobCore::CommitValues() {
  decision_.BeginCommit();  // from here on it completes forward
  values_.BeginCommit([this](const absl::Status& status) {
    if (status.ok() && !closed_) {
      SubmitParametersCommit();
      return;
    }
    decision_.End();
    if (!closed_) Close(absl::StrCat("commit of parameters: ", status.message()));
  });
  return absl::OkStatus();
}

void JobCore::SubmitParametersCommit() {
  auto done = work_.Join(optimizer_devices_.count(), [this](const absl::Status& status) {
    if (!status.ok()) {
      LogError(absl::StrCat("job ", name(), ": commit of parameters: ", status.message()));
      decision_.End();
      Close(absl::StrCat("commit of parameters: ", status.message()));
      return;
    }
    snapshots_.TakeThen(/*due=*/true, [this] { FinishParametersCommit(); });
  });
  const std::vector<bool> written_gradients = values_.TakeWrittenGradients();
  DeviceOps ops(world_size());
  for (int r = 0; r < world_size(); ++r) {
    ops[r] = CommitOps(*plan_, memory_->pointers(), r);
    for (DeviceOp& op : GradientCopyOps(*plan_, memory_->pointers(), written_gradients, r)) {
      ops[r].push_back(std::move(op));
    }
  }
  optimizer_devices_.Submit(absl::StrCat("cast version ", committed_.version() + 1),
                            optimizer_devices_.Divide(std::move(ops)), done);
}

void JobCore::FinishParametersCommit() {
  decision_.End();
  if (closed_) {
    return;
  }
  committed_.CommitVersion();
  snapshots_.Outdate();
  values_.Committed();
  summons_.WritesCommitted();
  unsharding_.NewVersion();
  events_.Add(-1, "parameters", absl::StrCat("version ", committed_.version()));
  AfterCommit();
}

}  // namespace shardd
