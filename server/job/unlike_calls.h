#ifndef SHARDD_SERVER_JOB_UNLIKE_CALLS_H_
#define SHARDD_SERVER_JOB_UNLIKE_CALLS_H_

#include "absl/status/status.h"

namespace shardd {

class AskedSteps;
class Committed;
class FullParams;
class Passes;

// What each rank has sent and is not done with: EnterFullParams, EnterPass, Step.
struct AskedCalls {
  const Committed* committed = nullptr;
  const AskedSteps* steps = nullptr;
  const Passes* passes = nullptr;
  const FullParams* full_params = nullptr;
  int world_size = 0;
};

// Whether `rank` has sent one of these, so that it does nothing else before others have come to the same.
bool Waits(const AskedCalls& asked, int rank);
// FAILED_PRECONDITION: every rank waits, some of them in EnterFullParams, which others do not come to any more: they
// enter a pass, or have sent Step, whose commit the first ones would have to send it for. Names one of each.
absl::Status CheckLikeCalls(const AskedCalls& asked);

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_UNLIKE_CALLS_H_
