#ifndef SHARDD_TESTS_E2E_RANKS_STREAM_TRAINER_H_
#define SHARDD_TESTS_E2E_RANKS_STREAM_TRAINER_H_

// One rank on a GPU that never waits for it: its "kernels" are host functions in its own stream, so the host is ahead
// of them as a program's is. They work on mirrors in host memory; copies in the same stream, before and behind them,
// are what reads parameters and writes gradients. What it does besides is said by its arguments (and moments.h, whose
// moments are the host's):
//   streams=2            changes its stream at every step
//   legacy=1             its stream is the legacy default stream, NULL
//   look=1               reads the gradient shards behind shardd_wait_gradients, before the step
//   peek=1               reads a stored parameter behind shardd_await_step, and compares with the next forward's
//   hang=STEP            the kernel of mid's gradients does not end before "go.hang.R" is there; once
//   fail=MOMENT@STEP     its user code fails behind a submission of the step's first backward, once: it gives it up
//   order=head,mid,...   runs and submits the groups in this order
//   graph=1              captures a step's forwards and backwards once in a session, and launches them for every step
//   recover=1            attaches again after ABORTED and goes on at the committed step
//   recover_gone=1       likewise after UNAVAILABLE, behind the moment "gone"
// Its report has the notes "ordered 0|1", "aborted STEP MS TEXT", "gone TEXT" and "let_go MS" (how long the streams
// took then), "drained MS" (at the end), "captured TIMES", "refused TEXT" (of a call while its stream was captured and
// no graph was begun), "looked WORST", the largest relative difference of a norm from what the daemon says, and "peeked
// STEPS DIFFERENT".

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "client/cpp/shardd.h"
#include "tests/e2e/ranks/args.h"
#include "tests/e2e/ranks/device_values.h"
#include "tests/e2e/ranks/model.h"
#include "tests/e2e/ranks/moments.h"
#include "tests/e2e/ranks/report.h"
#include "tests/e2e/reference.h"

namespace shardd::e2e {

class StreamTrainer {
 public:
  explicit StreamTrainer(const Args& args);
  int Run();  // the exit code of the process

 private:
  // What the kernels of one forward and backward work on.
  struct Backward {
    Backward(int rank, int64_t step, int micro) : step(step), micro(micro), pass(MakeBatch(rank, step, micro)) {}
    int64_t step;
    int micro;
    Pass pass;
    Values gradient = Zeros();
  };

  Status Attach();
  Status Initialize();
  Status Train();
  Status TrainStep(int64_t step);
  Status ForwardBackward(int64_t step, int micro, bool last);
  Status ForwardBackward(Backward* at, bool last);
  Status Launch(int64_t step);  // stream_trainer_graph.cc
  Status Capture();
  Status Read(Backward* at, int group, shardd_phase phase);
  Status Release(int group) { return job_->group(group_[group]).Reshard(); }
  Status Submit(Backward* at, int group);
  Status Look(int64_t step);
  Status Peek();
  Status OutOfOrder(Backward* at);
  // Enqueues it into the current stream.
  void Kernel(std::function<void()> body);
  // Likewise: `body` gets the values of a parameter, in its dtype, that are at `data`: a GPU's memory, or the host's.
  void KernelOver(int param, const void* data, bool on_gpu, size_t size_bytes, std::function<void(const void*)> body);
  void Synchronise();

  Args args_;
  const Moments moments_;
  const std::string folder_;
  const int rank_;
  std::unique_ptr<RankGpu> gpu_;  // once attached
  std::vector<CUstream> streams_;
  size_t current_ = 0;
  std::unique_ptr<Job> job_;
  int32_t param_[kParamCount] = {};
  int32_t group_[kGroupCount] = {};
  bool raf_[kGroupCount] = {};
  std::string dtype_[kGroupCount];
  bool hung_ = false, failed_ = false;
  bool capturing_ = false;
  int32_t graph_ = -1;  // of this session
  CUgraphExec exec_ = nullptr;
  int captures_ = 0;
  std::string refused_;
  std::vector<std::unique_ptr<Backward>> captured_;             // by micro-batch
  std::vector<std::unique_ptr<std::function<void()>>> bodies_;  // of captured kernels
  double worst_look_ = 0;
  // Of the kernels, which follow each other. Mirrors are pinned, of 4 bytes for each element.
  void* in_[kParamCount] = {};
  void* out_[kParamCount] = {};
  Values seen_;
  double looked_ = 0;
  Tensor peeked_;
  int peeks_ = 0, different_ = 0;
  std::vector<double> losses_;
  TrainerReport report_;
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_RANKS_STREAM_TRAINER_H_
