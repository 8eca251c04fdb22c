#ifndef SHARDD_CLIENT_CTL_OFFLINE_H_
#define SHARDD_CLIENT_CTL_OFFLINE_H_

#include "absl/status/status.h"
#include "client/ctl/options.h"

namespace shardd::ctl {

// plan and predict are worked out here, from files, by the code that the daemon has, too.
inline bool AsksNoDaemon(Command command) { return command == Command::kPlan || command == Command::kPredict; }

// Runs such a command and prints its answer. Errors as PlanModel and PredictModel; FAILED_PRECONDITION: a file cannot
// be read or written.
absl::Status RunOffline(const Options& options);

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_OFFLINE_H_
