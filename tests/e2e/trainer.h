#ifndef SHARDD_TESTS_E2E_TRAINER_H_
#define SHARDD_TESTS_E2E_TRAINER_H_

// One rank: a process that trains the model of model.h through libshardd.so. What it does besides is said by its
// arguments:
//   kill=MOMENT@STEP     SIGKILL to itself there (as long as the run is the rank's first: `incarnation` 0 or as given)
//   pause=MOMENT@STEP    says "at.MOMENT.RANK" in its folder and goes on when "go.MOMENT.RANK" is there
//   orphan=1             leaves a forked child behind that holds every descriptor of it
//   order=head,mid,...   runs and submits the groups in this order
//   skip=GROUP@STEP      leaves out the group's gradients
//   recover=1            attaches again after ABORTED and goes on at the committed step
// Results go to the folder: "rank.R" when it has ended (TrainerReport).

#include <memory>
#include <string>
#include <vector>

#include "client/cpp/shardd.h"
#include "tests/e2e/args.h"
#include "tests/e2e/model.h"

namespace shardd::e2e {

// What a rank found, as it wrote it down.
struct TrainerReport {
  int code = -1;  // shardd::Code of what ended it; -1: it never got so far
  std::string message;
  std::vector<double> losses;                         // by step, as far as this process trained
  std::vector<double> norms;                          // by step
  std::vector<double> clips;                          // by step
  Values values;                                      // at the end
  std::vector<std::string> notes;                     // "aborted STEP MS MESSAGE", "state ..."
  std::string Note(const std::string& prefix) const;  // the first note that begins so; "" without
};
TrainerReport ReadReport(const std::string& folder, int rank);

// CLOCK_MONOTONIC in ms, the same for all processes.
int64_t NowMs();

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
  Status ForwardBackward(int64_t step, int micro, bool last);
  // With the groups one after the other in the order given, whatever depends on what.
  Status OutOfOrder(int64_t step, int micro);
  Status ReadGroup(int group, shardd_phase phase, bool hold);
  Status Release(int group);
  Status Submit(int group, int64_t step, int micro);
  Status Finish();
  Status Writeback(int64_t step);

  void Moment(const std::string& name, int64_t step);
  void Note(const std::string& text);
  void WriteReport(const Status& status) const;
  bool At(const std::string& what, const std::string& name, int64_t step) const;
  void ReadParam(int param);

  const Args args_;
  const std::string folder_;
  const std::string dtype_;
  int rank_ = 0;
  std::unique_ptr<Job> job_;
  int32_t param_[kParamCount] = {};
  int32_t group_[kGroupCount] = {};
  bool raf_[kGroupCount] = {};
  std::vector<int> order_;
  Values seen_;      // parameters as last read
  Values gradient_;  // of the current backward
  TrainerReport report_;
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_TRAINER_H_
