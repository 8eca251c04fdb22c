#ifndef SHARDD_CLIENT_C_JOB_GRADIENTS_H_
#define SHARDD_CLIENT_C_JOB_GRADIENTS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/c/attachment/attachment.h"
#include "client/c/attachment/handle_set.h"

namespace shardd {

// Owns what the rank knows of the running step's gradients: which group may write which slot, which masks the daemon
// may still read, and how many backwards are closed. Thread-compatible. REQUIRES: group and param are within the plan.
class Gradients {
 public:
  Gradients(Attachment& attachment, HandleSet& handles) : attachment_(attachment), handles_(handles) {}
  // Begins a new session.
  void Reset();

  // These are calls of the C ABI.
  absl::Status WaitSlot(int group);
  void* SlotData(int param) const;
  absl::Status Submit(int group, const uint8_t* present, const uint8_t* fresh);
  absl::Status BackwardDone(bool last);
  absl::Status AbandonBackward();
  absl::Status SetPresence(int param, bool present);
  absl::Status GiveBack(int param);
  absl::Status WaitReduced();
  absl::StatusOr<const std::vector<int32_t>*> GivenByOthers();
  void* ShardData(int param) const;

  // Returns FAILED_PRECONDITION if all parameters of the group are frozen.
  absl::Status CheckTrains(const char* call, int group) const;
  // Returns INVALID_ARGUMENT if a mask (or null) has the bit of a frozen parameter, or of none.
  absl::Status CheckMasks(int group, const uint8_t* present, const uint8_t* fresh) const;

  // True if gradients were submitted since the last BackwardDone.
  bool backward_open() const { return backward_open_; }
  // True if the last backward of the step is closed.
  bool last_closed() const { return last_closed_; }
  int backwards() const { return backwards_; }                     // closed in this step
  uint64_t backwards_closed() const { return backwards_closed_; }  // in this session
  size_t slots() const { return slots_.size(); }
  // Records that a rank may have written gradients of the running step.
  void MayHaveSome() { has_gradients_ = true; }
  // Begins the next step, after the running one was sent. `goes_on`: a part of it was, and gradients of the rest stay.
  void BeginStep(bool goes_on = false);

 private:
  struct Slot {
    uint64_t submissions = 0;
    int holder = -1;    // the group that has waited for it and may write
    bool told = false;  // the daemon knows that this rank is stuck on it
  };
  absl::Status CheckMask(int group, const char* which, const uint8_t* mask) const;
  Slot& slot_of(int group) { return slots_[static_cast<size_t>(attachment_.plan().group(group).gradient_slot)]; }
  // Copies the given masks to where the daemon reads them, and returns the record's flags.
  uint32_t PutMasks(int group, const uint8_t* present, const uint8_t* fresh);

  Attachment& attachment_;
  HandleSet& handles_;
  std::vector<Slot> slots_;
  std::vector<uint64_t> mask_record_;  // by group: the last record that uses its masks
  int backwards_ = 0;
  uint64_t backwards_closed_ = 0;
  bool asks_for_others_ = false;          // the program has called GivenByOthers
  uint64_t others_seen_ = 0;              // of these, whether others gave what this rank did not is known
  std::vector<int32_t> given_by_others_;  // the last answer
  bool last_closed_ = false;
  bool backward_open_ = false;
  bool has_gradients_ = false;  // the running step may have some, of this rank or written by any
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_GRADIENTS_H_
