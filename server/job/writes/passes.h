#ifndef SHARDD_SERVER_JOB_WRITES_PASSES_H_
#define SHARDD_SERVER_JOB_WRITES_PASSES_H_

// Passes of jobs whose trainers write: all ranks enter one together, so that what they wrote before is a version.
//
//   rank:  kOutside --Enter--> kEntering --LetInAll (all have entered)--> kInside --Leave--> kOutside
//
// With pass_copies a pass reads copies: Announce (ranks may enqueue what reads them, if they are told) --> the copies
// are made --> CopiesMade --> LetInAll.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace shardd {

enum class Pass { kOutside, kEntering, kInside };

// Owns where each rank stands, and what it has said where it entered. Loop-confined.
class Passes {
 public:
  explicit Passes(int ranks) : ranks_(ranks) {}

  bool outside(int rank) const { return ranks_[rank].pass == Pass::kOutside; }
  bool entering(int rank) const { return ranks_[rank].pass == Pass::kEntering; }
  bool inside(int rank) const { return ranks_[rank].pass == Pass::kInside; }
  // What the rank wrote before it entered is an optimizer step, which is not committed yet.
  bool stepped(int rank) const { return ranks_[rank].stepped; }
  // The signal behind which the rank's device has done with what it did before.
  uint64_t enter_signal(int rank) const { return ranks_[rank].enter_signal; }
  bool announced() const { return announced_; }
  // Ranks know of it, and hosts that are ahead of their devices go on.
  bool told() const { return told_; }
  // Some rank has said where it entered that it has edits, which are written back before anybody is let in for good.
  bool any_edits() const;
  // All ranks enter, and each waits for snapshots before it stores into state that it keeps.
  bool all_ask_to_store() const;
  // With the copies of the announced pass a snapshot is taken.
  bool takes_snapshot() const { return takes_snapshot_; }
  bool copied() const { return copied_; }
  // Over nodes: what ranks have stored is kept, to be said to the other nodes, or is said.
  bool saying() const { return saying_; }
  void BeginSaying() { saying_ = true; }
  // The copies wait for the devices of the ranks.
  bool awaits_devices() const { return awaits_devices_; }

  void Enter(int rank, bool stepped, uint64_t signal);
  // Without a step, takes the place of the rank's trainer state where the pass begins.
  void SetTrainerState(int rank, std::string state) { ranks_[rank].trainer_state = std::move(state); }
  const std::string& trainer_state(int rank) const { return ranks_[rank].trainer_state; }
  // Returns it, and forgets it; empty: the rank has given none.
  std::string TakeTrainerState(int rank) { return std::exchange(ranks_[rank].trainer_state, {}); }
  void ForgetTrainerStates();
  void SetAsksToStore(int rank) { ranks_[rank].asks_to_store = true; }
  void SetHasEdits(int rank) { ranks_[rank].has_edits = true; }
  void Announce(bool tell, bool takes_snapshot) {
    announced_ = true;
    told_ = tell;
    takes_snapshot_ = takes_snapshot;
  }
  void AwaitDevices(bool awaits) { awaits_devices_ = awaits; }
  void CopiesMade() { copied_ = true; }
  // What ranks wrote is a version's.
  void StepsCommitted();
  void LetInAll();
  // The rank goes on in the others' pass.
  void Readmit(int rank) { ranks_[rank].pass = Pass::kInside; }
  // By itself, or with its step.
  void Leave(int rank) { ranks_[rank].pass = Pass::kOutside; }
  // The rank takes no part in this step any more.
  void Forget(int rank) { ranks_[rank] = OfRank(); }
  void EndEpoch();

 private:
  struct OfRank {
    Pass pass = Pass::kOutside;
    bool stepped = false;
    std::string trainer_state;
    uint64_t enter_signal = 0;
    bool asks_to_store = false;  // as the rank said where it entered last
    bool has_edits = false;      // likewise
  };
  std::vector<OfRank> ranks_;
  bool announced_ = false;
  bool told_ = false;
  bool takes_snapshot_ = false;
  bool copied_ = false;
  bool awaits_devices_ = false;
  bool saying_ = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_PASSES_H_
