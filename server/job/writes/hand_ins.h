#ifndef SHARDD_SERVER_JOB_WRITES_HAND_INS_H_
#define SHARDD_SERVER_JOB_WRITES_HAND_INS_H_

// Handing in, of ranks that store into private views of the shards: a rank that asks may hand in what it has stored
// from the moment it is let in until its next pass or step.
//
//   rank:  closed --Ask--> wants --Open (no rank is inside a pass)--> open --Close--> closed
//
// With pass_copies nobody hands in: a rank that asks waits only until nobody reads full parameters, and then may store
// whenever it is outside of a pass.

#include <utility>
#include <vector>

namespace shardd {

// Owns who has asked and who hands in. Loop-confined.
class HandIns {
 public:
  explicit HandIns(int ranks) : ranks_(ranks) {}

  bool wants(int rank) const { return ranks_[rank].wants; }
  bool open(int rank) const { return ranks_[rank].open; }
  // Some rank was let in since the last version, so the shards may differ from it.
  bool any_since_version() const { return any_since_version_; }
  // With pass_copies: ranks that ask wait for devices that may read full parameters.
  bool awaits_devices() const { return awaits_devices_; }

  void Ask(int rank) { ranks_[rank].wants = true; }
  void Open(int rank) {
    ranks_[rank].wants = false;
    ranks_[rank].open = true;
    any_since_version_ = true;
  }
  // With pass_copies. True: the rank has asked, and is to be told that it may store.
  bool LetStore(int rank) { return std::exchange(ranks_[rank].wants, false); }
  // The rank enters a pass.
  void Close(int rank) { ranks_[rank].open = false; }
  // The rank ends its step.
  void CloseWithStep(int rank) { ranks_[rank].open = ranks_[rank].wants = false; }
  // What was handed in is a version. True: some rank was let in.
  bool Commit() { return std::exchange(any_since_version_, false); }
  void AwaitDevices(bool awaits) { awaits_devices_ = awaits; }
  // The rank takes no part in this step any more.
  void Forget(int rank) { ranks_[rank] = OfRank(); }
  void EndEpoch() {
    ranks_.assign(ranks_.size(), OfRank());
    any_since_version_ = awaits_devices_ = false;
  }

 private:
  struct OfRank {
    bool wants = false;
    bool open = false;
  };
  std::vector<OfRank> ranks_;
  bool any_since_version_ = false;
  bool awaits_devices_ = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_HAND_INS_H_
