#ifndef SHARDD_COMMON_HANDLE_HANDLE_H_
#define SHARDD_COMMON_HANDLE_HANDLE_H_

// The state of one parameter group for one rank, and the table of legal requests. The client applies it before it sends
// a request, so that a mistake fails the call that made it; the daemon applies it again to what arrives. The table
// itself is kTable in handle.cc; what a whole job does next is another table, server/job/advance.cc.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace shardd {

// Which memory of the group the rank can read.
enum class StorageState {
  kSharded,     // only the shards exist
  kUnsharding,  // the slot is being filled, or the version is not ready; not readable yet
  kUnsharded,   // full parameters are readable; `users` counts who needs them (nested use, ties)
};

// Position of the rank within a step, for one group.
enum class TrainingState {
  kIdle,          // outside of a pass
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
  kBackwardDone,     // applies to every handle of the rank
  kStep,             // applies to every handle of the rank
  kEnterFullParams,  // applies to every handle of the rank
  kLeaveFullParams,
  kAbandon,  // applies to every handle of the rank: user code gave up its forward or backward
};

absl::string_view StorageStateName(StorageState state);
absl::string_view TrainingStateName(TrainingState state);
absl::string_view HandleEventName(HandleEvent event);

// Thread-compatible. Copyable: a copy is a dry run.
class Handle {
 public:
  // Applies the table's row for (training, event). If there is none, returns FAILED_PRECONDITION and changes nothing:
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

// The transition table for the documentation: one markdown row per row of the table, and the training states as a
// mermaid state diagram of the transitions that change the state.
std::string HandleTableMarkdown();
std::string HandleTableMermaid();

}  // namespace shardd

#endif  // SHARDD_COMMON_HANDLE_HANDLE_H_
