#ifndef SHARDD_CLIENT_CTL_COMMANDS_H_
#define SHARDD_CLIENT_CTL_COMMANDS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/ctl/options.h"
#include "grpcpp/channel.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd::ctl {

// One request to the daemon behind `channel` and its answer as text, ready to print. Blocks up to options.timeout.
// INVALID_ARGUMENT: no job is named and there are several. NOT_FOUND: no such job. `past`: what `top` was told before,
// if it is not empty, and is told now; null: neither. REQUIRES: the command is one that asks a daemon.
absl::StatusOr<std::string> Execute(const std::shared_ptr<grpc::Channel>& channel, const std::string& address,
                                    const Options& options, bool color, v1::GetMetricsResponse* past = nullptr);

ExitCode ExitCodeOf(const absl::Status& status);

// The whole program but for the arguments' parsing; prints to standard output and standard error.
int Run(const Options& options);

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_COMMANDS_H_
