#ifndef SHARDD_COMMON_HANDLE_HANDLE_H_
#define SHARDD_COMMON_HANDLE_HANDLE_H_

// The state of one parameter group for one rank, and the one table that says which request is legal in it. The client
// runs it before it sends (a mistake is an error in the call that made it), the daemon again on what arrives.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace shardd {

// Which memory of the group is alive for the rank.
enum class StorageState {
  kSharded,     // nothing but the shards
  kUnsharding,  // a slot is being filled or the version awaited; not readable yet
  kUnsharded,   // full parameters readable; `users` counts who needs them (nested use, ties)
};

// Where the rank stands with the group within a step.
enum class TrainingState {
  kIdle,          // outside a pass
  kForward,       // unsharded at least once in this forward
  kBackwardPre,   // unsharded for backward; gradients not yet submitted
  kBackwardPost,  // gradients submitted in this backward; may be submitted again
  kFullParams,    // inside EnterFullParams .. LeaveFullParams
};

enum class HandleEvent {
  kUnshardForward,
  kUnshardBackward,
  kUnshardDone,  // raised by whoever learns that the unshard is complete
  kReshard,
  kSubmitGradients,
  kBackwardDone,     // to every handle of the rank
  kStep,             // to every handle of the rank
  kEnterFullParams,  // to every handle of the rank
  kLeaveFullParams,
  kAbandon,  // to every handle of the rank: user code gave up its forward or backward
};

absl::string_view StorageStateName(StorageState state);
absl::string_view TrainingStateName(TrainingState state);
absl::string_view HandleEventName(HandleEvent event);

// Thread-compatible. Copyable: a copy is a dry run.
class Handle {
 public:
  // Applies the row of the table for (training, event). FAILED_PRECONDITION, state unchanged, where there is none:
  // `Reshard group "layers.3": not legal in SHARDED/IDLE (expected one of Unshard, ...; rank=2)`.
  absl::Status Apply(HandleEvent event, absl::string_view group, int rank);

  StorageState storage() const { return storage_; }
  TrainingState training() const { return training_; }
  int users() const { return users_; }
  std::string DebugString() const;  // "UNSHARDED(1)/FORWARD"
  bool operator==(const Handle&) const = default;

 private:
  StorageState storage_ = StorageState::kSharded;
  TrainingState training_ = TrainingState::kIdle;
  int users_ = 0;
};

// The transition table as documentation shows it: one markdown row per row of the table, and the training states as a
// mermaid state diagram (transitions that change the state only).
std::string HandleTableMarkdown();
std::string HandleTableMermaid();

}  // namespace shardd

#endif  // SHARDD_COMMON_HANDLE_HANDLE_H_
