// Jobs whose trainers write: passes that ranks enter together, and write windows between them.
//
//   rank:  kOutside --OpenWindow--> (window) --EnterPass--> kEntering --all have--> kInside --LeavePass--> kOutside
//
// What a reader sees never changes under it: windows open when no rank is inside, passes begin when no window is open.
// A rank that has paused (PassWord) reads nothing: a window that another rank waits for ends its pass. Where a pass
// begins, what was written becomes the next version. A rank that dies in between leaves torn shards: the job goes back
// to the copy that was kept before a window opened, when the others can store no more (job_kept.cc). Where passes read
// copies there is nothing to wait for but the copies (job_passes.cc).

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

// How soon a rank that pauses is noticed by one that waits for its window.
constexpr absl::Duration kPausePoll = absl::Microseconds(500);
// Of which LateRanks and CheckStuckWindows ask whom they wait for.
constexpr size_t kMostBlockedAtOnce = 8;
// A rank that waits so long for a window while another waits for its gradients will not get it.
constexpr absl::Duration kStuckAfter = absl::Seconds(1);

absl::Status NeverWrite(int rank, absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat(
      what, ": the job's trainers never write (got trainers_never_write true, want false; rank=", rank, ")"));
}

}  // namespace

absl::Status JobCore::OnEnterPass(Session* session, RankCommand command) {
  const int rank = session->rank();
  RankStep& state = ranks_[rank];
  if (!trainers_write()) {
    return NeverWrite(rank, "EnterPass");
  }
  if (committed_.version() == 0 || full_params_.asked(rank) || !passes_.outside(rank) || windows_.wants(rank)) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "EnterPass",
                     committed_.version() == 0  ? "the job has no parameters yet"
                     : full_params_.asked(rank) ? "the rank is inside EnterFullParams"
                     : windows_.wants(rank)     ? "the rank is waiting for its write window"
                     : passes_.entering(rank)   ? "the rank is entering already"
                                                : "the rank is inside one; LeavePass first");
  }
  SHARDD_RETURN_IF_ERROR(CheckNobodyFinished(rank, "EnterPass"));
  const bool stepped = (command.flags & kStepped) != 0;
  if (static_cast<int64_t>(command.trainer_state.size()) > kMaxTrainerStateBytes) {
    return RankError(absl::StatusCode::kInvalidArgument, rank, "EnterPass",
                     absl::StrCat("trainer state is too large (got ", command.trainer_state.size(), ", want at most ",
                                  kMaxTrainerStateBytes, " bytes)"));
  }
  if (stepped) {
    if (state.stepped) {
      return RankError(absl::StatusCode::kFailedPrecondition, rank, "EnterPass",
                       "the rank has sent Step for this step");
    }
    SHARDD_RETURN_IF_ERROR(pairing_.CheckClosed(rank, "EnterPass"));
    state.step.Clear();
    state.step.set_trainer_state(std::move(command.trainer_state));
  } else if (!command.trainer_state.empty()) {
    passes_.SetTrainerState(rank, std::move(command.trainer_state));
  }
  passes_.Enter(rank, stepped, command.done);
  windows_.Close(rank);
  if (stepped) {
    SHARDD_RETURN_IF_ERROR(CloseStep(session));
  }
  return absl::OkStatus();
}

absl::Status JobCore::OnLeavePass(Session* session) {
  const int rank = session->rank();
  if (!trainers_write()) {
    return NeverWrite(rank, "LeavePass");
  }
  if (windows_.TakeOvertaken(rank) && passes_.outside(rank)) {
    return absl::OkStatus();  // it did not know yet
  }
  if (!passes_.inside(rank)) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "LeavePass", "the rank is not inside a pass");
  }
  passes_.Leave(rank);
  return absl::OkStatus();
}

absl::Status JobCore::OnOpenWindow(Session* session) {
  const int rank = session->rank();
  if (!trainers_write()) {
    return NeverWrite(rank, "OpenWindow");
  }
  if (committed_.version() == 0 || full_params_.asked(rank) || !passes_.outside(rank) || windows_.wants(rank) ||
      windows_.open(rank)) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "OpenWindow",
                     committed_.version() == 0                     ? "the job has no parameters yet"
                     : full_params_.asked(rank)                    ? "the rank is inside EnterFullParams"
                     : windows_.open(rank) || windows_.wants(rank) ? "the rank has asked for it already"
                                                                   : "the rank is inside a pass; LeavePass first");
  }
  if (!pass_copies()) {  // else it waits for nobody but who reads full parameters
    SHARDD_RETURN_IF_ERROR(CheckNobodyFinished(rank, "OpenWindow"));
  }
  windows_.Ask(rank);
  return absl::OkStatus();
}

// All enter: whether they have sent Step too, whose commit comes before the pass. An error where they differ.
absl::StatusOr<bool> JobCore::StepComesFirst() const {
  const auto has_stepped = [](const RankStep& r) { return r.stepped; };
  if (const auto one = std::find_if(ranks_.begin(), ranks_.end(), has_stepped); one != ranks_.end()) {
    const auto other = std::find_if_not(ranks_.begin(), ranks_.end(), has_stepped);
    if (other == ranks_.end()) {
      return true;
    }
    return RankError(
        absl::StatusCode::kFailedPrecondition, static_cast<int>(other - ranks_.begin()), "EnterPass",
        absl::StrCat("the rank enters a pass without the Step that rank ", one - ranks_.begin(), " has sent"));
  }
  const bool stepped = passes_.stepped(0);
  for (int rank = 1; rank < world_size(); ++rank) {
    if (passes_.stepped(rank) != stepped) {
      return RankError(absl::StatusCode::kFailedPrecondition, rank, "EnterPass",
                       absl::StrCat("ranks differ in whether they made an optimizer step (got ", !stepped, " on rank ",
                                    rank, ", ", stepped, " on rank 0)"));
    }
  }
  return false;
}

bool JobCore::NoStepComesFirst() const {
  const absl::StatusOr<bool> step_first = StepComesFirst();
  return !step_first.ok() || !*step_first;
}

absl::Status JobCore::CommitWindow() {
  SHARDD_RETURN_IF_ERROR(StepComesFirst().status());
  const bool stepped = passes_.stepped(0);
  if (!stepped) {
    for (int rank = 0; rank < world_size(); ++rank) {
      if (std::string state = passes_.TakeTrainerState(rank); !state.empty()) {
        committed_.SetTrainerState(rank, std::move(state));
        snapshot_.Outdate();
      }
    }
    if (!windows_.any_since_version()) {
      BeginPass();
      return absl::OkStatus();
    }
  }
  SHARDD_RETURN_IF_ERROR(stepped ? CompareOrders() : absl::OkStatus());
  DeviceOps ops = stepped ? SettleAllPresence() : DeviceOps(world_size());  // before backwards count from 0 again
  decision_.BeginCommit();
  auto done = Join(world_size(), [this, stepped](const absl::Status& status) {  // an abort waits for it
    decision_.End();
    if (!status.ok()) {
      Close(absl::StrCat("commit of a write window: ", status.message()));
      return;
    }
    FinishWindow(stepped);
  });
  for (int rank = 0; rank < world_size(); ++rank) {
    DeviceWork work;
    work.label = absl::StrCat("cast version ", committed_.version() + 1);
    work.ops = std::move(ops[rank]);
    if (windows_.any_since_version()) {
      for (DeviceOp& op : CommitOps(*plan_, memory_->pointers(), rank)) {
        work.ops.push_back(std::move(op));
      }
    }
    work.done = done;
    devices_[rank]->Submit(StreamId::kOptimizer, std::move(work));
  }
  return absl::OkStatus();
}

// A rank that left a forward without its backward and enters another pass, while others have done that backward and
// wait for its gradients or its step: it goes on in their pass. Nobody writes meanwhile.
std::vector<int> JobCore::LateRanks() const {
  int furthest = 0;  // backwards that somebody has closed who is still inside, or has stepped
  std::vector<int> wanted;
  for (int rank = 0; rank < world_size(); ++rank) {
    const RankStep& r = ranks_[rank];
    if (passes_.inside(rank) || r.stepped) {
      furthest = std::max(furthest, pairing_.closed(rank));
    }
    // Each step that a rank makes looks again, so a few at a time will do.
    if (passes_.inside(rank) && pairing_.sleeps(rank) && wanted.size() < kMostBlockedAtOnce) {
      wanted.push_back(WaitingFor(rank).rank);
    }
  }
  std::vector<int> late;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (passes_.entering(rank) && !passes_.stepped(rank) &&
        (pairing_.closed(rank) < furthest || std::find(wanted.begin(), wanted.end(), rank) != wanted.end())) {
      late.push_back(rank);
    }
  }
  return late;
}

void JobCore::ReadmitLate() {
  for (const int rank : LateRanks()) {
    passes_.Readmit(rank);
    if (pass_copies()) {
      sessions_[rank]->words().PublishPassIssued();
    }
    sessions_[rank]->words().PublishPass();
  }
}

void JobCore::FinishWindow(bool stepped) {
  if (closed_) {
    return;
  }
  passes_.StepsCommitted();
  if (stepped) {
    EndStep({});
  } else {
    committed_.CommitVersion();
    NoteWindowCommitted();
    unshards_.NewVersion();
  }
  AfterCommit();  // lets them in, unless somebody died meanwhile
}

void JobCore::NoteWindowCommitted() {
  if (windows_.Commit()) {
    snapshot_.Age();
    counters_.set_windows(counters_.windows() + 1);
  }
}

void JobCore::BeginPass() {
  counters_.set_passes(counters_.passes() + 1);
  passes_.LetInAll();
  for (int rank = 0; rank < world_size(); ++rank) {
    sessions_[rank]->words().PublishPass();
  }
}

// A rank that has stepped reads no more; another may still write before its own step, but it itself only after the
// commit.
bool JobCore::MayOpenWindows() const {
  if (snapshot_.taking() || full_params_.AnyAsked()) {
    return false;
  }
  for (int rank = 0; rank < world_size(); ++rank) {
    if (windows_.wants(rank) && !ranks_[rank].stepped) {
      return true;
    }
  }
  return false;
}

void JobCore::OpenWindows() {
  if (!windows_.any_since_version() && snapshot_.IsDueBeforeWindow()) {
    Keep();
    return;
  }
  if (!EndPausedPasses()) {
    return;
  }
  for (int rank = 0; rank < world_size(); ++rank) {
    if (windows_.wants(rank) && !ranks_[rank].stepped) {
      windows_.Open(rank);
      sessions_[rank]->words().PublishWindow();
    }
  }
}

// No rank reads in its pass.
bool JobCore::ReadersPause() const {
  int written_after = 0;  // backwards that who wants to write has done: those of readers come first
  for (int rank = 0; rank < world_size(); ++rank) {
    if (windows_.wants(rank) && !ranks_[rank].stepped) {
      written_after = std::max(written_after, pairing_.closed(rank));
    }
  }
  for (int rank = 0; rank < world_size(); ++rank) {
    if (!passes_.inside(rank)) {
      continue;
    }
    // What it sent before it paused comes first, too.
    if (!sessions_[rank]->words().pass_paused() || sessions_[rank]->HasCommands() ||
        pairing_.closed(rank) < written_after) {
      return false;
    }
  }
  return true;
}

bool JobCore::EndPausedPasses() {
  for (int rank = 0; rank < world_size(); ++rank) {
    if (!passes_.inside(rank)) {
      continue;
    }
    if (!sessions_[rank]->words().Overtake()) {
      return false;  // it has begun its backward just now; the others before it know that their pass is over
    }
    passes_.Leave(rank);
    windows_.Overtake(rank);
  }
  return true;
}

void JobCore::PollPausesLater() {
  windows_.PollPauses(true);
  loop_->AddTimer(MonotonicNow() + kPausePoll, [weak = weak_from_this()] {
    if (const std::shared_ptr<JobCore> self = weak.lock(); self != nullptr) {
      self->windows_.PollPauses(false);
      self->Advance();
    }
  });
}

// A store between a forward and its backward, on a rank without which the others' backward does not end. Each rank is
// looked at once, however many wait.
absl::Status JobCore::CheckStuckWindows(absl::Time now) const {
  std::vector<bool> stuck(static_cast<size_t>(world_size()), false);
  int behind = -1;  // of them, who has closed the fewest backwards
  for (int rank = 0; rank < world_size() && !plan_->config.allow_missing_contribution(); ++rank) {
    if (windows_.wants(rank) && now - sessions_[rank]->last_command_time >= kStuckAfter) {
      stuck[rank] = true;
      behind = behind < 0 || pairing_.closed(rank) < pairing_.closed(behind) ? rank : behind;
    }
  }
  const int64_t first = absl::ToUnixMillis(now) / 100 * static_cast<int64_t>(kMostBlockedAtOnce);
  size_t asked = 0;
  for (int i = 0; i < world_size() && behind >= 0; ++i) {
    // Who is asked for whom it waits costs more: a few at a time, others with the next tick.
    const int reader = static_cast<int>((first + i) % world_size());
    if (!passes_.inside(reader)) {
      continue;
    }
    int rank = pairing_.closed(reader) > pairing_.closed(behind) ? behind : -1;
    if (rank < 0 && pairing_.sleeps(reader) && asked++ < kMostBlockedAtOnce) {
      const int waits_for = WaitingFor(reader).rank;
      rank = waits_for >= 0 && stuck[waits_for] ? waits_for : -1;
    }
    if (rank >= 0) {
      return RankError(absl::StatusCode::kFailedPrecondition, rank, "OpenWindow",
                       absl::StrCat("the rank writes parameters between a forward and its backward, for whose "
                                    "gradients rank ",
                                    reader, " waits; write after the backward"));
    }
  }
  return absl::OkStatus();
}

}  // namespace shardd
