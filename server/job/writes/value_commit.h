#ifndef SHARDD_SERVER_JOB_WRITES_VALUE_COMMIT_H_
#define SHARDD_SERVER_JOB_WRITES_VALUE_COMMIT_H_

// Initial values, or written full parameters, become a version when all ranks have sent CommitParameters and, over
// several nodes, when all nodes have said the same values.

#include <vector>

namespace shardd {

// Owns who has sent CommitParameters, and what other nodes were told. Loop-confined.
class ValueCommit {
 public:
  explicit ValueCommit(int ranks) : asked_(ranks) {}

  bool asked(int rank) const { return asked_[rank]; }
  bool any_asked() const;
  // Over several nodes: this one has said its values, or is about to.
  bool said() const { return said_; }
  // ... and still reads them, also where its epoch has ended meanwhile.
  bool reading() const { return reading_; }

  void Ask(int rank) { asked_[rank] = true; }
  // The rank leaves full parameters, or takes no part in this step any more.
  void Forget(int rank) { asked_[rank] = false; }
  void BeginSaying() { said_ = reading_ = true; }
  void EndReading() { reading_ = false; }
  // The values are a version.
  void Committed();
  void EndEpoch() { Committed(); }

 private:
  std::vector<bool> asked_;
  bool said_ = false;
  bool reading_ = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_VALUE_COMMIT_H_
