#ifndef SHARDD_CLIENT_CTL_PREDICT_SIMULATION_H_
#define SHARDD_CLIENT_CTL_PREDICT_SIMULATION_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/ctl/predict/machine.h"
#include "client/ctl/predict/step_program.h"
#include "client/ctl/predict/transfers.h"
#include "common/plan/plan.h"

namespace shardd::ctl {

// What a stream of the rank does for a while, from the step's beginning.
struct Span {
  enum class What { kForward, kBackward, kUpdate, kUnshard, kReduce };
  What what = What::kForward;
  int group = -1;  // -1: all
  double begin_s = 0;
  double end_s = 0;
};

// One step of a rank, the second one: the order is known from the first. Times are disjoint and add up to the step.
struct Prediction {
  double step_s = 0;
  double compute_s = 0;
  double update_s = 0;
  double exposed_unshard_s = 0;    // the rank computes nothing because a group is not there yet
  double exposed_reduction_s = 0;  // or because gradients are being reduced
  double rest_s = 0;               // or because its program, or the commit, takes its time
  std::vector<double> exposed_unshard_of_group_s;
  Traffic traffic;     // of the rank's links in the step
  int unshards = 0;    // gathers of the step
  int prefetched = 0;  // of these: began before they were asked for
  std::vector<Span> spans;
};

// Runs one rank's step against the daemon's own schedule (common/schedule) and the links of a machine. All ranks are
// taken to be alike. INVALID_ARGUMENT: the model needs more of the pool than it has. Takes time that grows with groups.
absl::StatusOr<Prediction> Predict(const std::shared_ptr<const ShardPlan>& plan, const Fleet& fleet,
                                   const Machine& machine, const Load& load);

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_PREDICT_SIMULATION_H_
