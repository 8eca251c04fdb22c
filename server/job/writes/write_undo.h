#ifndef SHARDD_SERVER_JOB_WRITES_WRITE_UNDO_H_
#define SHARDD_SERVER_JOB_WRITES_WRITE_UNDO_H_

// Whether something is written that no version has, and is to be undone: old counts of updates, and of old bytes
// (server/storage/undo_slab.h) that there are some.
//
//   nothing --WillSave--> writes --BeginCommit--> nothing
//                                \-BeginUndo----> undoing (UndoSlab::PutBack on the copier) --EndUndo--> nothing

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace shardd {

// Owns the counts. Loop-confined.
class WriteUndo {
 public:
  // The parameter's count of updates is about to be written.
  void SaveCount(int param, int64_t count) { counts_.try_emplace(param, count); }
  // A copy that saves old bytes of this version is about to be made.
  void WillSave(uint64_t version) { saves_ = version; }
  // What was written is about to be a version. True: when it is, old bytes are to be forgotten.
  bool BeginCommit();
  // Puts the counts back into `update_counts` (by parameter). A version: its old bytes are to be put back; undoing()
  // until EndUndo.
  std::optional<uint64_t> BeginUndo(std::vector<int64_t>* update_counts);
  void EndUndo() { undoing_ = false; }
  // Something is written that no version has, and is not being undone.
  bool any() const { return saves_.has_value() || !counts_.empty(); }
  // Nobody may read or write slabs meanwhile.
  bool undoing() const { return undoing_; }

 private:
  std::map<int, int64_t> counts_;  // by parameter
  std::optional<uint64_t> saves_;
  bool undoing_ = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_WRITE_UNDO_H_
