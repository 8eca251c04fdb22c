#ifndef SHARDD_CLIENT_CTL_PREDICT_STEP_PROGRAM_H_
#define SHARDD_CLIENT_CTL_PREDICT_STEP_PROGRAM_H_

#include <vector>

#include "client/ctl/predict/machine.h"
#include "common/plan/plan.h"

namespace shardd::ctl {

// What one rank works through in a step.
struct Load {
  double tokens = 0;           // of one rank and step
  bool checkpointing = false;  // backward computes each group's forward once more
};

// One thing that a trainer's program does, as the library's hooks have it.
struct Instruction {
  enum class Kind { kUnshard, kCompute, kReshard, kSubmitGradients };
  Kind kind = Kind::kCompute;
  int group = 0;
  bool backward = false;
  double compute_s = 0;  // kCompute
};

// One step: each group is unsharded around its module, groups inside others stay between these. A group with others
// inside computes half of its own before them and half behind. Tied parameters are taken for those of their first
// group.
std::vector<Instruction> StepProgram(const ShardPlan& plan, const Machine& machine, const Load& load);

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_PREDICT_STEP_PROGRAM_H_
