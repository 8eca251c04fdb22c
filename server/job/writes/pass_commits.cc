#include "server/job/writes/pass_commits.h"

#include <algorithm>
#include <utility>

#include "common/clock/monotonic_now.h"
#include "common/status/status_macros.h"
#include "server/job/full_params/summons.h"
#include "server/job/step/commits.h"
#include "server/job/step/committed.h"
#include "server/job/unshard/unsharding.h"
#include "server/job/work/optimizer_devices.h"
#include "server/job/writes/snapshot_keeper.h"
#include "server/optimizer/optimizer.h"
#include "server/storage/job_memory.h"

namespace shardd {

absl::Status PassCommits::Enter(int rank, RankCommand command) {
  use_.snapshots->PassBegins(MonotonicNow());
  const bool stepped = (command.flags & kStepped) != 0;
  SHARDD_RETURN_IF_ERROR(use_.writes->EnterPass(rank, stepped, command.done, &command.trainer_state));
  if ((command.flags & kAsksToStore) != 0) use_.writes->AsksToStore(rank);
  if ((command.flags & kEdits) != 0) SHARDD_RETURN_IF_ERROR(use_.writes->HasEdits(rank));
  return stepped ? use_.commits->StepInTrainer(rank, std::move(command.trainer_state)) : absl::OkStatus();
}

bool PassCommits::SetTrainerStates() {
  bool any = false;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (std::string state = use_.writes->TakeTrainerState(rank); !state.empty()) {
      any = true;
      use_.committed->SetTrainerState(rank, std::move(state));
      if (!use_.writes->pass_copies()) use_.snapshots->Outdate();  // else it is taken by the number of passes
    }
  }
  return any;
}

absl::Status PassCommits::Commit(bool edited) {
  SHARDD_RETURN_IF_ERROR(use_.writes->StepComesFirst().status());
  const bool copies = use_.writes->pass_copies();
  const bool stepped = use_.writes->passes().stepped(0);
  const bool stored = copies || use_.writes->hand_ins().any_since_version();
  if (!stepped) {
    const bool any = SetTrainerStates();
    if (!stored) {
      if (any) use_.committed->CommitTrainerStates();
      use_.writes->LetInAll(/*to_write_back=*/edited);
      return absl::OkStatus();
    }
  }
  DeviceOps ops(world_size());
  if (stepped) {
    SHARDD_RETURN_IF_ERROR(use_.unsharding->CompareOrders());
    SHARDD_ASSIGN_OR_RETURN(ops, use_.commits->SettleGradients());  // before backwards count from 0 again
  }
  const bool settles = std::any_of(ops.begin(), ops.end(), [](const auto& of_rank) { return !of_rank.empty(); });
  for (int rank = 0; rank < world_size() && stored; ++rank) {
    for (DeviceOp& op : CommitOps(*use_.plan, use_.memory->pointers(), rank)) {
      ops[rank].push_back(std::move(op));
    }
  }
  Commits::Version version;
  version.what = copies ? "copies for a pass" : "commit of what ranks handed in";
  version.label = copies ? "copy" : "cast";
  version.ops = std::move(ops);
  version.in_order = settles || use_.plan->shard_copies > 1;
  // As it was when ranks were told, or not.
  version.snapshot_is_due =
      copies && use_.writes->passes().takes_snapshot() && use_.snapshots->snapshot().IsDueByItself();
  version.stepped = stepped;
  version.commit = [this, stepped, stored] {
    if (stored) use_.snapshots->Age();
    use_.writes->CommitPass();  // Advance lets them in, unless somebody has died meanwhile
    stepped ? use_.commits->CommitStepInTrainers() : use_.committed->CommitVersion();
  };
  use_.commits->Make(std::move(version));
  return absl::OkStatus();
}

absl::Status PassCommits::SayStores() {
  const bool stepped = use_.writes->passes().stepped(0);
  DeviceOps ops(static_cast<size_t>(world_size()));
  if (stepped) {
    SHARDD_RETURN_IF_ERROR(use_.unsharding->CompareOrders());
    SHARDD_ASSIGN_OR_RETURN(ops, use_.commits->SettleGradients());  // before backwards count from 0 again
    use_.commits->BeginInTrainers();
  }
  use_.writes->BeginSaying();
  use_.snapshots->TakeNext(std::move(ops), [this, stepped] {
    if (stepped) {
      use_.commits->StoredInTrainers();
      return;
    }
    std::vector<std::string> states;
    for (int rank = 0; rank < world_size(); ++rank) states.push_back(use_.writes->passes().trainer_state(rank));
    use_.say_pass(std::move(states));
  });
  return absl::OkStatus();
}

void PassCommits::Agreed() {
  Commits::Version version;
  version.what = "copies for a pass";
  version.label = "copy";
  version.ops.resize(static_cast<size_t>(world_size()));
  for (int rank = 0; rank < world_size(); ++rank) {
    version.ops[static_cast<size_t>(rank)] = CommitOps(*use_.plan, use_.snapshots->snapshot().NextPointers(), rank);
  }
  version.commit = [this] {
    (void)SetTrainerStates();
    use_.writes->CommitPass();
    use_.committed->CommitVersion();
  };
  use_.commits->Make(std::move(version));
}

absl::Status PassCommits::Announce(bool tell) {
  SHARDD_RETURN_IF_ERROR(use_.writes->StepComesFirst().status());
  use_.writes->Announce(tell, use_.snapshots->snapshot().IsDueWithPass());
  return absl::OkStatus();
}

absl::StatusOr<bool> PassCommits::HaveCome(const char* what, std::vector<DoneSignal> signals,
                                           void (TrainerWrites::*await)(bool)) {
  if (use_.given_back->HaveCome(signals)) {
    return true;
  }
  Held held;
  held.order = Held::Order::kDecisions;
  held.what = what;
  held.signals = std::move(signals);
  (use_.writes->*await)(true);
  held.run = [this, await] {
    (use_.writes->*await)(false);
    return absl::OkStatus();
  };
  SHARDD_RETURN_IF_ERROR(use_.given_back->When(std::move(held)));
  return false;
}

absl::Status PassCommits::CommitBehindDevices() {
  SHARDD_RETURN_IF_ERROR(use_.writes->StepComesFirst().status());
  std::vector<DoneSignal> signals;
  for (int rank = 0; rank < world_size(); ++rank) {
    signals.push_back(use_.given_back->SignalOf(rank, use_.writes->passes().enter_signal(rank)));
  }
  SHARDD_ASSIGN_OR_RETURN(const bool came, HaveCome("EnterPass", std::move(signals), &TrainerWrites::AwaitPassDevices));
  if (!came) return absl::OkStatus();
  return use_.say_pass != nullptr ? SayStores() : Commit();
}

void PassCommits::LetHandIn() {
  if (!use_.writes->hand_ins().any_since_version() && use_.snapshots->snapshot().IsDueBeforeHandIn()) {
    use_.snapshots->Take();
    return;
  }
  // Shards are torn from here on, until what is handed in becomes a version.
  use_.committed->CountSnapshot(use_.snapshots->snapshot().step(), use_.snapshots->snapshot().trainer_states());
  use_.writes->LetHandIn();
}

absl::Status PassCommits::LetStore() {
  std::vector<DoneSignal> signals;
  for (int rank = 0; rank < world_size(); ++rank) {
    signals.push_back(use_.given_back->SignalOf(rank, use_.summons->full_params().leave_signal(rank)));
  }
  SHARDD_ASSIGN_OR_RETURN(const bool came,
                          HaveCome("LeaveFullParams", std::move(signals), &TrainerWrites::AwaitStoreDevices));
  if (came) {
    use_.summons->LeaveSignalsCame();
    use_.writes->LetStore();
  }
  return absl::OkStatus();
}

}  // namespace shardd
