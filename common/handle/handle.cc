#include "common/handle/handle.h"

#include <array>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace shardd {
namespace {

// Sets of training states a row applies to.
constexpr uint8_t Bit(TrainingState state) { return static_cast<uint8_t>(1u << static_cast<int>(state)); }
constexpr uint8_t kInIdle = Bit(TrainingState::kIdle);
constexpr uint8_t kInForward = Bit(TrainingState::kForward);
constexpr uint8_t kInPre = Bit(TrainingState::kBackwardPre);
constexpr uint8_t kInPost = Bit(TrainingState::kBackwardPost);
constexpr uint8_t kInFull = Bit(TrainingState::kFullParams);
constexpr uint8_t kInTraining = kInIdle | kInForward | kInPre | kInPost;

// Far beyond any nesting. Keeps a trainer that never reshards from overflowing the count.
constexpr int kMaxUsers = 1 << 20;

// users > 0 exactly when storage is not SHARDED, so guards on storage are guards on users too.
enum class Guard : uint8_t { kNone, kHasUsers, kNoUsers };
enum class Storage : uint8_t { kKeep, kAddUser, kDropUser, kDropAll, kReady };
enum class Next : uint8_t { kStay, kIdle, kForward, kBackwardPre, kBackwardPost, kFullParams };

struct Row {
  HandleEvent event;
  uint8_t from;
  Guard guard;
  Next to;
  Storage storage;
  const char* why;
};

using E = HandleEvent;
constexpr Row kTable[] = {
    {E::kUnshardForward, kInIdle | kInForward, Guard::kNone, Next::kForward, Storage::kAddUser,
     "a forward begins, or uses the group once more (nested use, ties)"},
    {E::kUnshardForward, kInPre | kInPost, Guard::kNone, Next::kStay, Storage::kAddUser,
     "recomputation inside backward, or the next micro-batch's forward, leaves the state of backward alone"},
    {E::kUnshardBackward, kInTraining, Guard::kNone, Next::kBackwardPre, Storage::kAddUser,
     "backward needs the parameters; from IDLE where an overlapping micro-batch's backward has just been closed"},
    {E::kUnshardDone, kInTraining, Guard::kHasUsers, Next::kStay, Storage::kReady,
     "the parameters are readable; repeating it changes nothing"},
    {E::kReshard, kInTraining, Guard::kHasUsers, Next::kStay, Storage::kDropUser,
     "one user less; the last one releases the memory"},
    {E::kSubmitGradients, kInForward | kInPre | kInPost, Guard::kNone, Next::kBackwardPost, Storage::kKeep,
     "gradients are in the slot, so the parameters may be sharded or not; FORWARD: unsharded since forward"},
    {E::kBackwardDone, kInPre | kInPost, Guard::kNone, Next::kIdle, Storage::kKeep, "this backward is closed"},
    {E::kBackwardDone, kInIdle | kInForward, Guard::kNone, Next::kStay, Storage::kKeep,
     "the backward did not touch the group, or another micro-batch's forward uses it"},
    {E::kStep, kInTraining, Guard::kNoUsers, Next::kIdle, Storage::kKeep,
     "nobody reads the parameters any more, so the update may be in place"},
    {E::kEnterFullParams, kInIdle | kInForward | kInPost, Guard::kNoUsers, Next::kFullParams, Storage::kKeep,
     "ranks read full parameters between passes, never beside a reader or before gradients are submitted"},
    {E::kLeaveFullParams, kInFull, Guard::kNone, Next::kIdle, Storage::kKeep,
     "the rank has stopped reading the full parameters"},
    {E::kAbandon, kInTraining, Guard::kNone, Next::kIdle, Storage::kDropAll,
     "user code abandoned its forward or backward and reads the parameters no more"},
};

constexpr bool GuardsOverlap(Guard a, Guard b) { return a == Guard::kNone || b == Guard::kNone || a == b; }

// At most one row applies to any state and event.
constexpr bool IsDeterministic() {
  for (size_t i = 0; i < std::size(kTable); ++i) {
    for (size_t j = i + 1; j < std::size(kTable); ++j) {
      if (kTable[i].event == kTable[j].event && (kTable[i].from & kTable[j].from) != 0 &&
          GuardsOverlap(kTable[i].guard, kTable[j].guard)) {
        return false;
      }
    }
  }
  return true;
}
static_assert(IsDeterministic());

constexpr E kEvents[] = {E::kUnshardForward,  E::kUnshardBackward, E::kUnshardDone, E::kReshard,
                         E::kSubmitGradients, E::kBackwardDone,    E::kStep,        E::kEnterFullParams,
                         E::kLeaveFullParams, E::kAbandon};

constexpr TrainingState kTrainingStates[] = {TrainingState::kIdle, TrainingState::kForward, TrainingState::kBackwardPre,
                                             TrainingState::kBackwardPost, TrainingState::kFullParams};

bool GuardHolds(Guard guard, StorageState storage) {
  switch (guard) {
    case Guard::kNone:
      return true;
    case Guard::kHasUsers:
      return storage != StorageState::kSharded;
    case Guard::kNoUsers:
      return storage == StorageState::kSharded;
  }
  return false;
}

const Row* FindRow(HandleEvent event, TrainingState training, StorageState storage) {
  for (const Row& row : kTable) {
    if (row.event == event && (row.from & Bit(training)) != 0 && GuardHolds(row.guard, storage)) {
      return &row;
    }
  }
  return nullptr;
}

TrainingState NextTraining(Next to, TrainingState from) {
  switch (to) {
    case Next::kStay:
      return from;
    case Next::kIdle:
      return TrainingState::kIdle;
    case Next::kForward:
      return TrainingState::kForward;
    case Next::kBackwardPre:
      return TrainingState::kBackwardPre;
    case Next::kBackwardPost:
      return TrainingState::kBackwardPost;
    case Next::kFullParams:
      return TrainingState::kFullParams;
  }
  return from;
}

absl::string_view GuardText(Guard guard) {
  switch (guard) {
    case Guard::kNone:
      return "";
    case Guard::kHasUsers:
      return "users > 0";
    case Guard::kNoUsers:
      return "users == 0";
  }
  return "";
}

absl::string_view StorageText(Storage storage) {
  switch (storage) {
    case Storage::kKeep:
      return "";
    case Storage::kAddUser:
      return "users + 1; SHARDED -> UNSHARDING";
    case Storage::kDropUser:
      return "users - 1; at 0 -> SHARDED";
    case Storage::kDropAll:
      return "users = 0; -> SHARDED";
    case Storage::kReady:
      return "UNSHARDING -> UNSHARDED";
  }
  return "";
}

}  // namespace

absl::string_view StorageStateName(StorageState state) {
  switch (state) {
    case StorageState::kSharded:
      return "SHARDED";
    case StorageState::kUnsharding:
      return "UNSHARDING";
    case StorageState::kUnsharded:
      return "UNSHARDED";
  }
  return "?";
}

absl::string_view TrainingStateName(TrainingState state) {
  switch (state) {
    case TrainingState::kIdle:
      return "IDLE";
    case TrainingState::kForward:
      return "FORWARD";
    case TrainingState::kBackwardPre:
      return "BACKWARD_PRE";
    case TrainingState::kBackwardPost:
      return "BACKWARD_POST";
    case TrainingState::kFullParams:
      return "FULL_PARAMS";
  }
  return "?";
}

absl::string_view HandleEventName(HandleEvent event) {
  switch (event) {
    case HandleEvent::kUnshardForward:
      return "UnshardForward";
    case HandleEvent::kUnshardBackward:
      return "UnshardBackward";
    case HandleEvent::kUnshardDone:
      return "UnshardDone";
    case HandleEvent::kReshard:
      return "Reshard";
    case HandleEvent::kSubmitGradients:
      return "SubmitGradients";
    case HandleEvent::kBackwardDone:
      return "BackwardDone";
    case HandleEvent::kStep:
      return "Step";
    case HandleEvent::kEnterFullParams:
      return "EnterFullParams";
    case HandleEvent::kLeaveFullParams:
      return "LeaveFullParams";
    case HandleEvent::kAbandon:
      return "Abandon";
  }
  return "?";
}

absl::Status Handle::Apply(HandleEvent event, absl::string_view group, int rank) {
  const Row* row = FindRow(event, training_, storage_);
  if (row == nullptr) {
    // The most frequent mistake gets its own text: only the users are wrong.
    const bool has_only_users_wrong = users_ > 0 && FindRow(event, training_, StorageState::kSharded) != nullptr;
    if (has_only_users_wrong) {
      return absl::FailedPreconditionError(absl::StrCat(HandleEventName(event), " group \"", group,
                                                        "\": the group is still unsharded (got ", DebugString(),
                                                        ", want no users; rank=", rank, "); reshard it first"));
    }
    std::vector<absl::string_view> expected;
    for (HandleEvent other : kEvents) {
      // Abandon is no remedy, and nearly always legal.
      if (other != HandleEvent::kUnshardDone && other != HandleEvent::kAbandon &&
          FindRow(other, training_, storage_) != nullptr) {
        expected.push_back(HandleEventName(other));
      }
    }
    return absl::FailedPreconditionError(absl::StrCat(HandleEventName(event), " group \"", group, "\": not legal in ",
                                                      DebugString(), " (expected one of ",
                                                      absl::StrJoin(expected, ", "), "; rank=", rank, ")"));
  }
  if (row->storage == Storage::kAddUser && users_ >= kMaxUsers) {
    return absl::FailedPreconditionError(absl::StrCat(HandleEventName(event), " group \"", group,
                                                      "\": too many users (got ", users_, ", want < ", kMaxUsers,
                                                      "; rank=", rank, "); reshard it as often as it is unsharded"));
  }
  training_ = NextTraining(row->to, training_);
  switch (row->storage) {
    case Storage::kKeep:
      break;
    case Storage::kAddUser:
      if (users_++ == 0) {
        storage_ = StorageState::kUnsharding;
      }
      break;
    case Storage::kDropUser:
      if (--users_ == 0) {
        storage_ = StorageState::kSharded;
      }
      break;
    case Storage::kDropAll:
      users_ = 0;
      storage_ = StorageState::kSharded;
      break;
    case Storage::kReady:
      storage_ = StorageState::kUnsharded;
      break;
  }
  return absl::OkStatus();
}

std::string Handle::DebugString() const {
  std::string text(StorageStateName(storage_));
  if (users_ > 0) {
    absl::StrAppend(&text, "(", users_, ")");
  }
  absl::StrAppend(&text, "/", TrainingStateName(training_));
  return text;
}

std::string HandleTableMarkdown() {
  std::string text = "| event | in | if | then | storage | why |\n|---|---|---|---|---|---|\n";
  for (const Row& row : kTable) {
    std::vector<absl::string_view> from;
    for (TrainingState state : kTrainingStates) {
      if ((row.from & Bit(state)) != 0) {
        from.push_back(TrainingStateName(state));
      }
    }
    absl::StrAppend(&text, "| ", HandleEventName(row.event), " | ", absl::StrJoin(from, ", "), " | ",
                    GuardText(row.guard), " | ",
                    row.to == Next::kStay ? "stays" : TrainingStateName(NextTraining(row.to, TrainingState::kIdle)),
                    " | ", StorageText(row.storage), " | ", row.why, " |\n");
  }
  return text;
}

std::string HandleTableMermaid() {
  std::string text = "stateDiagram-v2\n  [*] --> IDLE\n";
  for (TrainingState from : kTrainingStates) {
    for (const Row& row : kTable) {
      if ((row.from & Bit(from)) == 0) {
        continue;
      }
      const TrainingState to = NextTraining(row.to, from);
      // The table has the self-loops; the picture would drown in them.
      if (to != from) {
        absl::StrAppend(&text, "  ", TrainingStateName(from), " --> ", TrainingStateName(to), ": ",
                        HandleEventName(row.event), "\n");
      }
    }
  }
  return text;
}

}  // namespace shardd
