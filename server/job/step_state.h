#ifndef SHARDD_SERVER_JOB_STEP_STATE_H_
#define SHARDD_SERVER_JOB_STEP_STATE_H_

// What a job knows of each rank in its running step, beside gradients: all that an abort drops. Plain data of JobCore.

#include <cstdint>
#include <optional>

#include "shardd/v1/trainer.pb.h"

namespace shardd {

// One rank's place in the running step.
struct RankStep {
  bool stepped = false;
  v1::Step step;
  bool committed_params = false;
  bool finished = false;
  std::optional<bool> pending_detach;  // asked for after Step; its value: finished
  uint64_t done_at_step = 0;           // the signal of its device (given_back.h)
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_STEP_STATE_H_
