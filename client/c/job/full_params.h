#ifndef SHARDD_CLIENT_C_JOB_FULL_PARAMS_H_
#define SHARDD_CLIENT_C_JOB_FULL_PARAMS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/c/attachment/attachment.h"
#include "client/c/attachment/handle_set.h"
#include "client/c/job/edits.h"
#include "client/c/job/gradients.h"
#include "client/c/job/hand_ins.h"

namespace shardd {

struct FullParamsOptions {
  int group = -1;  // -1: the whole model
  bool recurse = true;
  bool writeback = false;
  bool rank0_only = false;
  bool with_grads = false;
  bool of_edits = false;  // with writeback: what this rank has stored is what it writes
  bool operator==(const FullParamsOptions&) const = default;
};

// Owns whether the rank is inside of full parameters. All ranks enter together; all or rank 0 read them, and write them
// if that was asked for. Thread-compatible. REQUIRES: group and param are within the plan.
class FullParams {
 public:
  FullParams(Attachment& attachment, HandleSet& handles, Gradients& gradients, HandIns& hand_ins, Edits& edits)
      : attachment_(attachment), handles_(handles), gradients_(gradients), hand_ins_(hand_ins), edits_(edits) {}
  // Begins a new session.
  void Reset();

  // These are calls of the C ABI.
  absl::Status Enter(const FullParamsOptions& options);
  absl::Status Leave();
  const void* ParameterData(int param) const;
  const void* GradientData(int param) const;
  // The same, within another call.
  absl::Status EnterWithin(const FullParamsOptions& options);
  absl::Status LeaveWithin();

  // True while the rank is inside with writeback and has not committed yet.
  bool written_back() const { return state_ == State::kInside && writeback_; }
  bool with_grads() const { return options_.with_grads; }
  // Returns FAILED_PRECONDITION if this rank may not write the parameter. REQUIRES: written_back().
  absl::Status CheckEntered(const char* call, int param) const;
  // Returns FAILED_PRECONDITION, and makes it the job's failure, if the rank has stored into shards since it entered.
  absl::Status CheckNotStored() const;
  // Records that all ranks have committed what they wrote.
  void Committed() { writeback_ = false; }

 private:
  enum class State { kOutside, kEntering, kInside };
  absl::Status CheckMayEnter(const FullParamsOptions& options) const;
  absl::Status SendEnter(const FullParamsOptions& options, const WaitFor& reason);
  // Receives the event of the entry: whether it was refused, and which gradients exist.
  absl::Status TakeAnswer();
  bool Gives(int param) const;
  std::string EnterObject() const;

  Attachment& attachment_;
  HandleSet& handles_;
  Gradients& gradients_;
  HandIns& hand_ins_;
  Edits& edits_;
  State state_ = State::kOutside;
  FullParamsOptions options_;    // as entered
  std::vector<bool> entered_;    // by parameter
  std::string gradients_there_;  // mask by parameter
  bool writeback_ = false;       // entered with it and not committed yet
  uint64_t entries_ = 0;         // in this session
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_FULL_PARAMS_H_
