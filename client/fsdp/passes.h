#ifndef SHARDD_CLIENT_FSDP_PASSES_H_
#define SHARDD_CLIENT_FSDP_PASSES_H_

#include <string>

#include "client/fsdp/shell.h"

namespace shardd::fsdp {

// The passes of a rank whose program stores into its parameters. A pass is a forward and its backward, in which no rank
// stores; what was stored is handed in where the next one begins. Between a forward and what may be its backward the
// rank has stopped reading: a store there is an edit if no backward comes, and an error of the backward if one does.
// With copies for passes no store is in anybody's way: a pass reads what the daemon has copied where it began.
//
// Owns whether this rank is inside a pass, why, and what its next one commits. What fails in the shell leaves that as
// it was, unless a function says otherwise. Thread-compatible, as a shardd_job.
class Passes {
 public:
  // The shell outlives it.
  explicit Passes(PassShell& shell) : shell_(shell) {}
  Passes(const Passes&) = delete;
  Passes& operator=(const Passes&) = delete;

  // Ranks enter passes together from here on. Until then this rank enters none, and ending one does nothing. `copies`:
  // passes read copies (JobConfig.pass_copies).
  void Use(bool copies);
  bool used() const { return used_; }
  bool copies() const { return copies_; }
  // Also of a pass that an edit between a forward and its backward has ended.
  bool inside() const { return inside_; }
  // Inside, between a forward and what may be its backward.
  bool stopped_reading() const { return stopped_reading_; }
  // Entered for an unshard outside of forward and backward, or left open by one that keeps parameters unsharded.
  bool by_hand() const { return by_hand_; }

  // Enters a pass, or goes on with the one in which this rank has stopped reading. Commits what was marked.
  Status Enter();
  // The same for a forward, which takes over what was unsharded by hand.
  Status EnterForward();
  // For an unshard outside of forward and backward: the pass lasts until LeaveByHand or a forward.
  Status EnterByHand(bool backward);
  Status StopReading();
  // As StopReading; groups stay unsharded, so the pass lasts as one that was entered by hand.
  Status StopReadingByHand();
  // A backward begins: groups that stayed unsharded read the shards, too.
  Status ResumeReading();
  // Leaves the pass, if this rank is in one, and gives all groups back. After a failure it is left all the same.
  Status Leave();
  Status LeaveByHand() { return by_hand_ ? Leave() : Status(); }
  // Before a forward: what was written since the model's last one counts in this one, as where it is gathered anew.
  // Parts of the model may run in any number in one pass. `whole`: it is the model's forward.
  Status LeaveBefore(bool whole) { return stopped_reading_ && (whole || written_) ? Leave() : Status(); }
  // Leaves the pass. `reads_shards`: with copies it has read shards in their place, so that no rank stores into them
  // before all are done.
  Status End(bool reads_shards);
  // Makes what was written the next version now, with all ranks, and commits what was marked.
  Status Commit();

  // With copies: the program stores from here on. What is unsharded by hand is of before the store.
  Status BeginWriting();
  // An optimizer's step is under way, of which there may be one inside of another. A pass that begins in one, as of its
  // closure, is followed by stores without another call, so its shell waits until they may be made.
  void BeginStep() { ++steps_under_way_; }
  void EndStep() { steps_under_way_ -= steps_under_way_ > 0 ? 1 : 0; }
  bool in_step() const { return steps_under_way_ > 0; }
  // What was written since the last pass is an optimizer step, which the next pass commits with `state`.
  void MarkStepped(std::string state);
  // The next pass commits `state` with what was written.
  void MarkState(std::string state) { state_ = std::move(state); }

  // A step of the daemon's optimizer has ended the pass.
  void Stepped() { inside_ = stopped_reading_ = by_hand_ = written_ = false; }
  // The attachment is over.
  void Forget();

 private:
  PassShell& shell_;
  int steps_under_way_ = 0;  // one that has raised counts for ever: its passes wait, and nothing is wrong
  bool used_ = false;
  bool copies_ = false;
  bool written_ = false;  // with copies: since the forward of a pass whose backward may come
  bool inside_ = false;
  bool stopped_reading_ = false;
  bool by_hand_ = false;
  bool stepped_ = false;
  std::string state_;  // to be committed
};

}  // namespace shardd::fsdp

#endif  // SHARDD_CLIENT_FSDP_PASSES_H_
