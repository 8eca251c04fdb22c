#ifndef SHARDD_TESTS_E2E_RANKS_COPY_TRAINER_H_
#define SHARDD_TESTS_E2E_RANKS_COPY_TRAINER_H_

// One rank whose kernels are the GPU's own: the gradient of a parameter is the parameter, copied in the rank's stream
// from where it is unsharded into its gradient slot. Nothing goes through the host, which is ahead of the GPU as far as
// the library lets it, at any size; so bytes that are taken too early or overwritten too soon are wrong ones, and every
// rank looks at every element in the end. Argument model=copy chooses it; the model is that of blocks.h, without
// nested=.
//
//   loss = sum of w[i]^2 / 2        with SGD every step is w -= lr * w, rounded once, in whichever order sums are made
//
// What it does besides (and moments.h):
//   streams=2      changes its stream at every step
//   zeros=1        begins with zeros rather than with values of its own for every element
//   look_at_all=0  leaves out the look at every element
//   recover=1      attaches again after ABORTED and goes on at the committed step
// Its report has the notes "ordered 0|1" and "aborted STEP TEXT"; a wrong element is DATA_LOSS with its place.

#include <cstdint>
#include <memory>
#include <vector>

#include "client/cpp/shardd.h"
#include "tests/e2e/ranks/args.h"
#include "tests/e2e/ranks/device_values.h"
#include "tests/e2e/ranks/moments.h"
#include "tests/e2e/ranks/report.h"

namespace shardd::e2e {

class CopyTrainer {
 public:
  explicit CopyTrainer(const Args& args) : args_(args), moments_(args_) {}
  int Run();  // the exit code of the process

 private:
  Status Attach();
  Status Initialize();
  Status TrainAll();
  Status TrainStep(int64_t step);
  Status Forward(int group, int64_t step);
  Status Backward(int group, int64_t step);
  Status LookAtAll();

  const Args args_;
  const Moments moments_;
  std::unique_ptr<RankGpu> gpu_;  // once attached
  std::vector<CUstream> streams_;
  size_t current_ = 0;
  void* seen_ = nullptr;  // pinned; what forward reads
  std::unique_ptr<Job> job_;
  TrainerReport report_;
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_RANKS_COPY_TRAINER_H_
