#ifndef SHARDD_CLIENT_C_JOB_EDITS_H_
#define SHARDD_CLIENT_C_JOB_EDITS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/c/attachment/attachment.h"
#include "common/shm/private_view.h"

namespace shardd {

// Finds what this process has stored into its private view of the shards, and hands it in: the elements that this rank
// may write (WriteSegments) become the job's, all else is dropped. Owns which bytes those are. Thread-compatible.
class Edits {
 public:
  explicit Edits(Attachment& attachment) : attachment_(attachment) {}
  // Begins a new session.
  void Reset();

  // True if the rank stores into a private view. Else nothing is ever found.
  bool on() const { return attachment_.memory().shards_view().on(); }
  // Names the first parameter that differs from what all see, whoever's elements they are; "" if none does. REQUIRES:
  // inside a pass, when nobody hands in.
  absl::StatusOr<std::string> FindAny() const;
  // Names the first one of which this rank's own elements differ; if none does, drops what was stored elsewhere.
  absl::StatusOr<std::string> FindOwn();
  // A step is under way from the first on: the daemon changes what a page that is stored into would still show as it
  // was, so nothing may be stored. The second returns whether one was.
  void StepSent() { step_under_way_ = on(); }
  bool StepEnded() { return std::exchange(step_under_way_, false); }
  // Hands in and drops. REQUIRES: the daemon has let this rank hand in.
  absl::Status HandIn();
  // Calls `write` with what there is to hand in, in pieces of one parameter each, and drops it.
  using Write = absl::FunctionRef<absl::Status(int param, const void* data, int64_t first, int64_t numel)>;
  absl::Status WriteBack(Write write);

 private:
  using Range = PrivateView::Range;
  // The first byte in `range` of the slab that differs from what all see; -1: none.
  absl::StatusOr<int64_t> FirstDifference(Range range) const;
  // What is this rank's of `changed`.
  std::vector<Range> OwnOf(const std::vector<Range>& changed) const;
  absl::StatusOr<std::string> NameFirst(const std::vector<Range>& ranges) const;

  Attachment& attachment_;
  std::vector<Range> own_;  // of the slab, ascending
  bool step_under_way_ = false;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_EDITS_H_
