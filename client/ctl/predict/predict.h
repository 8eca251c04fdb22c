#ifndef SHARDD_CLIENT_CTL_PREDICT_PREDICT_H_
#define SHARDD_CLIENT_CTL_PREDICT_PREDICT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/ctl/predict/step_program.h"

namespace shardd::ctl {

// More than are served (kMaxNodes): a fleet that is too large for that is asked about before it is bought.
inline constexpr int kMostPredictedNodes = 1 << 14;

// `shardctl predict`: a step of the model on the machine, without a daemon, by the daemon's plan and schedule.
struct PredictedModel {
  std::string text;     // tables
  std::string json;     // the same figures, in seconds and bytes
  std::string picture;  // SVG: what the rank's streams do in the step
};

// `model` as ReadModel has it, for `world` ranks on `nodes` nodes; `machine` as ParseMachine. Errors as these, as
// PlanShards and as Predict.
absl::StatusOr<PredictedModel> PredictModel(absl::string_view model, int world, int nodes, absl::string_view machine,
                                            const Load& load);

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_PREDICT_PREDICT_H_
