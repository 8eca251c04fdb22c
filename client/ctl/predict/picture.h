#ifndef SHARDD_CLIENT_CTL_PREDICT_PICTURE_H_
#define SHARDD_CLIENT_CTL_PREDICT_PICTURE_H_

#include <string>

#include "absl/strings/string_view.h"
#include "client/ctl/predict/simulation.h"

namespace shardd::ctl {

// The step as an SVG document: a row for each of the rank's streams, with time from left to right. Text of the model is
// escaped.
std::string DrawStep(const Prediction& prediction, const ShardPlan& plan, absl::string_view title);

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_PREDICT_PICTURE_H_
