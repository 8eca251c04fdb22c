#ifndef SHARDD_TESTS_E2E_RANKS_PASS_TRAINER_H_
#define SHARDD_TESTS_E2E_RANKS_PASS_TRAINER_H_

// One rank that updates its shard itself, so that passes read copies (JobConfig.pass_copies), on CPUs and on GPUs: on
// GPUs it never waits for its stream (or, with ordered=0, before every call that gives something back), and what it
// computes are functions in its stream. The
// gradient of a parameter is the parameter, as it was unsharded. Argument model=pass chooses it; the model is that of
// blocks.h, without nested=; trained=sgd (with momentum) or adam is the optimizer in the trainer.
//
// What it does besides (and moments.h):
//   exact=1        looks for all bits of the model without a service; for sgd and ranks that are a power of two
//   midway=1       stores into its shards between forward and backward: they are made 3/4 of what they were
//   asks=1         asks before it stores into its optimizer's states, so that snapshots are taken behind passes
//   ahead=STEP     its stream stands still from before that pass is entered until the host has enqueued its forward
//   stuck=STEP     its stream stands still for some seconds before that pass
//   writeback=1    at the end, doubles every parameter by a writeback of full parameters and looks at that
//   by_groups=1    looks at values in a pass, group by group: nodes may have one copy between them
//   recover=1      attaches again after ABORTED and goes on at the committed step
// Its report has the notes "ordered 0|1", "ahead 0|1" (1: the stream was let go) and "aborted STEP TEXT"; a wrong
// element is DATA_LOSS with its place.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "client/cpp/shardd.h"
#include "tests/e2e/ranks/args.h"
#include "tests/e2e/ranks/device_values.h"
#include "tests/e2e/ranks/moments.h"
#include "tests/e2e/ranks/report.h"

namespace shardd::e2e {

class PassTrainer {
 public:
  explicit PassTrainer(const Args& args);
  int Run();  // the exit code of the process

 private:
  // Pinned, of one parameter: what its update reads and writes.
  struct Buffers {
    float* value = nullptr;
    float* gradient = nullptr;
    float* state[2] = {};
  };

  Status Attach();
  Status Initialize();
  Status TrainAll();
  Status TrainStep(int64_t step);
  Status Enter();
  Status Forward(int group);
  Status Backward(int group, bool first);
  void Midway();
  void StandStill(int64_t limit_ms);
  void Update(int64_t step);
  Status LookAtAll(int64_t steps);
  Status LookByGroups(const std::vector<float>& want);
  // At what Move has brought to the parameter's buffer.
  Status LookAt(int param, const std::vector<float>& want) const;
  Status Writeback();
  // In the rank's stream, or at once.
  void Move(void* to, const void* from, int64_t numel, int64_t element_bytes) const;
  void Compute(std::function<void()> body) const;
  void Fence() const;  // before what gives something back, where order is by the host

  Args args_;
  const Moments moments_;
  const bool bf16_;
  const int states_;
  std::unique_ptr<Job> job_;
  std::unique_ptr<RankGpu> gpu_;  // null: on a CPU
  CUstream stream_ = nullptr;
  bool ordered_ = false;
  std::atomic<bool> goes_on_ = false;
  std::atomic<bool> was_let_go_ = false;
  std::vector<Buffers> buffers_;  // by parameter
  int64_t stepped_ = 0;           // steps whose updates are enqueued; the pass that follows commits the last
  double factor_ = 1;             // of all values, after a writeback
  TrainerReport report_;
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_RANKS_PASS_TRAINER_H_
