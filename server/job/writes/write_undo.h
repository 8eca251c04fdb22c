#ifndef SHARDD_SERVER_JOB_WRITES_WRITE_UNDO_H_
#define SHARDD_SERVER_JOB_WRITES_WRITE_UNDO_H_

// What it takes to undo a writeback that is never committed: old bytes of slabs, and old counts of updates.
//
//   nothing --WillSave--> writes --BeginCommit--> (Forget on the copier) --> nothing
//                                \-BeginUndo----> undoing (PutBack on the copier) --EndUndo--> nothing

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/storage/job_slab.h"

namespace shardd {

// Owns both. Loop-confined, but for Save, PutBack and Forget, which copies call (value_copies.h), one at a time, and
// for bytes(), which is thread-safe.
class WriteUndo {
 public:
  // The parameter's count of updates is about to be written.
  void SaveCount(int param, int64_t count) { counts_.try_emplace(param, count); }
  // A copy that calls Save is about to be made.
  void WillSave() { saves_ = true; }
  // What was written is committed from here on. True: a copy has to call Forget.
  bool BeginCommit();
  // Puts the counts back into `update_counts` (by parameter). True: a copy has to call PutBack; undoing() until
  // EndUndo.
  bool BeginUndo(std::vector<int64_t>* update_counts);
  void EndUndo() { undoing_ = false; }
  // Nobody may read or write slabs meanwhile.
  bool undoing() const { return undoing_; }

  // Keeps each 64 KiB chunk once, as it was before the first write, so never more than the slabs themselves.
  absl::Status Save(const JobSlab* slab, int64_t offset_bytes, int64_t size_bytes);
  // Both do a piece of a few milliseconds and set *more if they are to be called again.
  // Writes the old bytes, also behind an error, and forgets them; the last call returns the first error.
  absl::Status PutBack(bool* more);
  void Forget(bool* more);

  int64_t bytes() const { return bytes_; }

 private:
  // Loop-confined.
  std::map<int, int64_t> counts_;  // by parameter
  bool saves_ = false;
  bool undoing_ = false;
  // Of copies.
  std::map<std::pair<const JobSlab*, int64_t>, std::string> chunks_;  // by slab and number
  std::atomic<int64_t> bytes_ = 0;
  absl::Status put_back_;  // the first error
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_WRITE_UNDO_H_
