#ifndef SHARDD_TESTS_E2E_RANKS_BLOCKS_H_
#define SHARDD_TESTS_E2E_RANKS_BLOCKS_H_

// A model of any size whose training needs no memory of its own: `blocks` fully sharded modules of `numel` elements and
// a bias under a small root, each element w[i] on its way to Target(i). Argument model=blocks chooses it; nested=1 puts
// two more into each; the groups run in the plan's order. What it does besides (and moments.h):
//   extend=STEP    biases are frozen before that step and trained from there on (shardd_extend_job)
//   give_back=1    gives the memory of its gradients back after each step; then comes the moment "given_back"
//   recover=1      attaches again after ABORTED and goes on at the committed step
//
//   loss = sum of (w[i] - Target(i))^2 / 2        gradient = w[i] - Target(i), made a chunk at a time

#include <cstdint>
#include <memory>
#include <string>

#include "client/cpp/shardd.h"
#include "tests/e2e/ranks/args.h"
#include "tests/e2e/ranks/device_values.h"
#include "tests/e2e/ranks/moments.h"
#include "tests/e2e/ranks/report.h"

namespace shardd::e2e {

// Its tree; proto3 JSON.
std::string BlocksTreeJson(const Args& args);

class BlocksTrainer {
 public:
  explicit BlocksTrainer(const Args& args);
  // Everything, from attach to report. The exit code of the process.
  int Run();

 private:
  Status TrainAll();
  Status TrainStep(int64_t step);
  Status Edit(int64_t step);
  Status Extend();
  Status Adopt();
  Status GiveBack(int64_t step);
  // Calls body(parameter index) for each parameter of the group while it is unsharded.
  template <typename Body>
  Status WithGroup(int group, shardd_phase phase, Body&& body);
  // Calls body(first element, chunk, numel of it) for all of the unsharded parameter, whose values it may write to.
  template <typename T, typename Body>
  void WithChunks(int param, Body&& body) const;
  template <typename T>
  double Loss(int param) const;
  template <typename T>
  void WriteGradient(int param) const;

  Args args_;
  const Moments moments_;
  const bool bf16_;
  std::unique_ptr<Job> job_;
  DeviceValues unsharded_;
  TrainerReport report_;
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_RANKS_BLOCKS_H_
