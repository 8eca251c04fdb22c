#ifndef SHARDD_SERVER_JOB_WRITES_HAND_INS_H_
#define SHARDD_SERVER_JOB_WRITES_HAND_INS_H_

// Handing in, of ranks that store into private views of the shards: a rank that asks may hand in what it has stored
// from the moment it is let in until its next pass or step.
//
//   rank:  closed --Ask--> wants --Open (no rank reads in a pass)--> open --Close--> closed
//
// A rank that has paused inside its pass (PassWord) reads nothing: another rank that wants to hand in ends its pass,
// which the rank hears of later (overtaken). With pass_copies nobody hands in: a rank that asks waits only until nobody
// reads full parameters, and then may store whenever it is outside of a pass.

#include <utility>
#include <vector>

namespace shardd {

// Owns who has asked, who hands in and whose pass was ended. Loop-confined.
class HandIns {
 public:
  explicit HandIns(int ranks) : ranks_(ranks) {}

  bool wants(int rank) const { return ranks_[rank].wants; }
  bool open(int rank) const { return ranks_[rank].open; }
  bool overtaken(int rank) const { return ranks_[rank].overtaken; }
  // Some rank was let in since the last version, so the shards may differ from it.
  bool any_since_version() const { return any_since_version_; }
  bool polls_pauses() const { return polls_pauses_; }
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
  // Another rank that hands in has ended the rank's pass; TakeOvertaken returns and forgets that.
  void Overtake(int rank) { ranks_[rank].overtaken = true; }
  bool TakeOvertaken(int rank) { return std::exchange(ranks_[rank].overtaken, false); }
  // The rank enters a pass.
  void Close(int rank) { ranks_[rank].open = ranks_[rank].overtaken = false; }
  // The rank ends its step.
  void CloseWithStep(int rank) { ranks_[rank].open = ranks_[rank].wants = false; }
  // What was handed in is a version. True: some rank was let in.
  bool Commit() { return std::exchange(any_since_version_, false); }
  void PollPauses(bool polls) { polls_pauses_ = polls; }
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
    bool overtaken = false;
  };
  std::vector<OfRank> ranks_;
  bool any_since_version_ = false;
  bool polls_pauses_ = false;  // a timer runs, whatever epoch it is
  bool awaits_devices_ = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_HAND_INS_H_
