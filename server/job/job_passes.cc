// Passes that read copies (JobConfig.pass_copies): the daemon makes them where a pass begins, when the devices of all
// ranks have done with what they have stored, and with what they have read of the copies before.
//
// Nobody waits for a write window then: shards are stored into at any time outside of EnterPass, and of full
// parameters, which are the shards themselves.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"
#include "server/observe/log.h"

namespace shardd {

// A trainer's stream that waited for the pass could hold up its sums (trainers/README.md).
bool JobCore::MayAnnouncePass() const {
  return !passes_.announced() && (!sums_.by_trainers() || pending_reductions_ == 0);
}

absl::Status JobCore::AnnouncePass() {
  SHARDD_RETURN_IF_ERROR(StepComesFirst().status());
  passes_.Announce();
  for (const auto& session : sessions_) {
    session->words().PublishPassIssued();
  }
  return absl::OkStatus();
}

absl::Status JobCore::BeginPassCopies() {
  SHARDD_RETURN_IF_ERROR(StepComesFirst().status());
  Held copies;
  copies.order = Held::Order::kDecisions;
  copies.what = "EnterPass";
  for (int rank = 0; rank < world_size(); ++rank) {
    copies.signals.push_back(given_back_.SignalOf(rank, passes_.enter_signal(rank)));
  }
  if (!given_back_.HaveCome(copies.signals)) {
    passes_.AwaitDevices(true);
    copies.run = [this] {
      passes_.AwaitDevices(false);
      return absl::OkStatus();
    };
    return given_back_.When(std::move(copies));
  }
  return CopyForPass();
}

absl::Status JobCore::CopyForPass() {
  const bool stepped = passes_.stepped(0);
  for (int rank = 0; rank < world_size() && !stepped; ++rank) {
    if (std::string state = passes_.TakeTrainerState(rank); !state.empty()) {
      committed_.SetTrainerState(rank, std::move(state));
    }
  }
  SHARDD_RETURN_IF_ERROR(stepped ? CompareOrders() : absl::OkStatus());
  DeviceOps ops = stepped ? SettleAllPresence() : DeviceOps(world_size());  // before backwards count from 0 again
  const bool settles = std::any_of(ops.begin(), ops.end(), [](const auto& of_rank) { return !of_rank.empty(); });
  for (int rank = 0; rank < world_size(); ++rank) {
    for (DeviceOp& op : CommitOps(*plan_, memory_->pointers(), rank)) {
      ops[rank].push_back(std::move(op));
    }
  }
  decision_.BeginCommit();  // an abort waits for it
  auto done = Join(optimizer_devices_.count(), [this, stepped](const absl::Status& status) {
    if (closed_) {
      return;
    }
    if (!status.ok()) {
      decision_.End();
      Close(absl::StrCat("copies for a pass: ", status.message()));
      return;
    }
    KeepThen(snapshot_.IsDueWithPass(), [this, stepped] { FinishPassCopies(stepped); });
  });
  ops = optimizer_devices_.Divide(std::move(ops), /*in_order=*/settles || plan_->shard_copies > 1);
  optimizer_devices_.Submit(absl::StrCat("copy version ", committed_.version() + 1), std::move(ops), done);
  return absl::OkStatus();
}

void JobCore::FinishPassCopies(bool stepped) {
  decision_.End();
  snapshot_.Age();
  passes_.StepsCommitted();
  if (stepped) {
    EndStep({});
  } else {
    committed_.CommitVersion();
    unshards_.NewVersion();
  }
  passes_.CopiesMade();
  AfterCommit();  // lets them in, unless somebody died meanwhile
}

// Who has left full parameters, or asks, may store when no other rank's device reads them any more.
absl::Status JobCore::LetStore() {
  Held left;
  left.order = Held::Order::kDecisions;
  left.what = "LeaveFullParams";
  for (int rank = 0; rank < world_size(); ++rank) {
    left.signals.push_back(given_back_.SignalOf(rank, full_params_.leave_signal(rank)));
  }
  if (!given_back_.HaveCome(left.signals)) {
    windows_.AwaitDevices(true);
    left.run = [this] {
      windows_.AwaitDevices(false);
      return absl::OkStatus();
    };
    return given_back_.When(std::move(left));
  }
  full_params_.LeaveSignalsCame();
  for (int rank = 0; rank < world_size(); ++rank) {
    if (windows_.LetStore(rank)) {
      sessions_[rank]->words().PublishWindow();
    }
  }
  return absl::OkStatus();
}

}  // namespace shardd
