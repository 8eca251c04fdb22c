#ifndef SHARDD_TESTS_E2E_RANKS_TRAINER_H_
#define SHARDD_TESTS_E2E_RANKS_TRAINER_H_

// One rank: a process that trains the model of model.h through libshardd.so. What it does besides is said by its
// arguments (and moments.h):
//   orphan=1             leaves a forked child behind that holds every descriptor of it
//   order=head,mid,...   runs and submits the groups in this order
//   skip=GROUP@STEP      leaves out the group's gradients
//   parts=1              several optimizers, each of which steps in a part of its own; 2: the last one in every other
//                        step
//   muon=1               the first of these optimizers is Muon; without parts, all step at once
//   adafactor=1          likewise, Adafactor
//   odd_initial=PARAMETER  its initial value ends otherwise
//   odd_order, odd_lr (of the last optimizer group), odd_max_norm, odd_norm_type, odd_writeback (at the end)
//   =VALUE@STEP
//                        what this rank does otherwise than the others, in that step, once
//   fail=MOMENT@STEP     its user code fails at that moment of a forward or backward (moments.h), once: it gives the
//                        backward up and does it again
//   of_any_rank=1        the trainer state may be that of another node's rank
//   load_every=N         before every Nth step all ranks write values (Load)
//   edits=1              with trainers_write=1: they store these into their own shards, outside of the passes in which
//                        they compute, and the next pass hands them in; 2: they hand them in at once
//   recover=1            attaches again after ABORTED and goes on at the committed step
//   bits=1               reports the bits of its shards and of its optimizer states (bits.h)
// Results go to the folder: "rank.R" when it has ended (TrainerReport).

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "client/cpp/shardd.h"
#include "tests/e2e/ranks/args.h"
#include "tests/e2e/ranks/device_values.h"
#include "tests/e2e/ranks/model.h"
#include "tests/e2e/ranks/moments.h"
#include "tests/e2e/ranks/report.h"

namespace shardd::e2e {

class Trainer {
 public:
  explicit Trainer(const Args& args);
  // Everything, from attach to report. The exit code of the process.
  int Run();

 private:
  Status Attach();
  Status Initialize();
  Status Train();
  Status TrainStep(int64_t step);
  // Of a step of several optimizers all parts but what commits it, for which `options` are then.
  Status StepInParts(int64_t step, shardd_step_options* options);
  Status ForwardBackward(int64_t step, int micro, bool last);
  // Reaches the moment; kUnknown where user code fails there.
  Status Come(const std::string& moment, int64_t step);
  // With the groups one after the other in the order given, whatever depends on what.
  Status OutOfOrder(const std::vector<int>& order, int64_t step, int micro);
  Status ReadGroup(int group, shardd_phase phase, bool hold);
  Status Release(int group);
  Status Submit(int group, int64_t step, int micro);
  Status Finish();
  Status ReadUnsharded();
  Status Writeback(int64_t step);
  bool LoadsBefore(int64_t step) const;
  // Inside of a pass where the job has them.
  Status InPass(int64_t step, const std::function<Status()>& body);
  Status Load(int64_t step);
  Status Edit(int64_t step);
  Status CheckLoadIsWhole(int64_t step);

  void ReadParam(int param);
  void WriteGradient(int param);  // into its slot
  // Where what this session's pointers name lies.
  void LookWhere();
  // VALUE where `what`=VALUE@STEP says so of this step, but not when the step is done again after an abort; else "".
  std::string Odd(const std::string& what, int64_t step);

  Args args_;
  const Moments moments_;
  const std::string folder_;
  std::string dtype_[kGroupCount];  // of what is read and submitted
  int rank_ = 0;
  int data_rank_ = 0;  // of all ranks of all nodes
  std::unique_ptr<Job> job_;
  DeviceValues unsharded_, state_;  // parameters and gradients; what may be offloaded
  int32_t param_[kParamCount] = {};
  int32_t group_[kGroupCount] = {};
  bool raf_[kGroupCount] = {};
  std::vector<int> order_;
  std::set<std::string> odd_;  // done already
  bool failed_ = false;        // likewise
  Values seen_;                // parameters as last read
  Values gradient_;            // of the current backward
  TrainerReport report_;
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_RANKS_TRAINER_H_
